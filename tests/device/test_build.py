"""Building and loading the backend: what can go wrong is said in one line."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import textwrap

import pytest

from prism_plugins.device import build
from prism_plugins.device.elf import needed_libraries
from prism_plugins.errors import PrismError


def test_cuda_ops_are_read_from_torchs_own_list():
    torch = build.find_torch()
    ops = build.cuda_ops(torch.root.parent / "torchgen/packaged/ATen/native/native_functions.yaml")
    assert len(ops) > 1000
    for op in (
        "aten::mm",
        "aten::add.Tensor",
        "aten::add_.Tensor",
        "aten::_fused_adamw_",
        "aten::native_layer_norm",
    ):
        assert op in ops
    for composite in ("aten::linear", "aten::zeros", "aten::reshape", "aten::mkldnn_linear"):
        assert composite not in ops


def test_torch_is_found_without_importing_it():
    code = "import sys; from prism_plugins.device.build import find_torch; t = find_torch(); "
    code += "assert 'torch' not in sys.modules; print(t.version, t.cuda)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    version, cuda = done.stdout.split()
    import torch

    assert version == torch.__version__
    assert cuda == str(torch.version.cuda)


def test_no_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(PrismError, match=r"install g\+\+.*apt install g\+\+.*conda"):
        build._compiler()


def test_compiler_errors_name_the_cause(tmp_path):
    source = tmp_path / "bad.cpp"
    source.write_text("int main() { return nothing; }")
    with pytest.raises(PrismError, match=r"bad\.cpp.*error.*nothing"):
        build._call([build._compiler(), "-c", str(source), "-o", str(tmp_path / "bad.o")], "bad.cpp")


def test_a_compiler_that_cannot_be_run_is_named(tmp_path):
    broken = tmp_path / "broken"
    broken.write_text("no program")
    broken.chmod(0o755)
    with pytest.raises(PrismError, match="broken cannot be run: Exec format error"):
        build._call([str(broken)], "x.cpp")


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")
def test_a_libstdcxx_linked_statically_is_not_offered_to_torch(tmp_path):
    compiler = "g++ -static-libstdc++ -static-libgcc"
    source = tmp_path / "prints.cpp"
    source.write_text('#include <iostream>\nextern "C" void prism_print(long n) { std::cout << n; }\n')
    try:
        found = build._compile_one(compiler, source, tmp_path, [])
        build._link(compiler, tmp_path, tmp_path / "libprints.so", [found])
    except PrismError as error:
        pytest.skip(f"no static libstdc++ here: {error}")
    library = ctypes.CDLL(str(tmp_path / "libprints.so"))
    assert library.prism_print
    assert not hasattr(library, "_ZNSo9_M_insertIlEERSoT_")  # std::ostream::_M_insert<long>


def test_unwritable_cache_falls_back_and_says_where(monkeypatch, tmp_path, capsys):
    file = tmp_path / "not_a_directory"
    file.write_text("")
    monkeypatch.setattr(build, "cache_folders", lambda: [file / "cache", tmp_path / "second"])
    assert build._writable_cache() == tmp_path / "second"
    assert str(tmp_path / "second") in capsys.readouterr().err
    monkeypatch.setattr(build, "cache_folders", lambda: [file / "one", file / "two"])
    with pytest.raises(PrismError, match="XDG_CACHE_HOME"):
        build._writable_cache()


def test_one_process_builds_and_the_others_wait(tmp_path, monkeypatch):
    calls = []

    def fake_compile(torch, path):
        calls.append(path)
        path.write_text("")

    monkeypatch.setattr(build, "cache_folders", lambda: [tmp_path])
    monkeypatch.setattr(build, "_compile", fake_compile)
    torch = build.find_torch()
    assert build.library_path(torch) == build.library_path(torch)
    assert len(calls) == 1


def test_the_cache_key_follows_torch_and_the_sources(monkeypatch):
    torch = build.find_torch()
    keys = {
        build._source_hash(torch),
        build._source_hash(build.TorchBuild(root=torch.root, version="2.11.0", cuda=None)),
    }
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DX"))
    keys.add(build._source_hash(torch))
    assert len(keys) == 3


LOAD = """
    import pathlib
    import sys
    from prism_plugins.device import build, load
    from prism_plugins.costs.cluster import load_cluster
    from prism_plugins.errors import PrismError
    from prism_plugins.program.slices import SliceSpec
    spec = SliceSpec(rank=0, world_size=8, gpus_per_node=8, argv=(), gpu=load_cluster("dgx-h200").gpu_facts(), slice_dir=".")
    {prepare}
    try:
        load.load_device(spec)
    except PrismError as error:
        print(error)
"""


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        ("import torch", "torch was imported before"),
        (
            "load.obstacle = lambda torch: 'torch has the CUDA runtime built into it'",
            "the CUDA runtime built into it",
        ),
        (
            "t = build.find_torch(); p = build.library_path(t); load.library_path = lambda t: p; "
            "load.find_torch = lambda: build.TorchBuild(root=t.root, version='2.99.0', cuda=t.cuda)",
            "was built for torch",
        ),
        ("load.library_path = lambda t: pathlib.Path('/nowhere/lib.so')", "does not load"),
    ],
)
def test_refusals(prepare, message):
    code = textwrap.dedent(LOAD).format(prepare=prepare)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ)
    assert message in done.stdout, done.stderr


def test_outside_a_slice_there_is_no_device():
    code = """
        from prism_plugins.capture.recorder import get_recorder
        from prism_plugins.errors import PrismError
        try:
            get_recorder()
        except PrismError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    assert "not a slice" in done.stdout


def _fake_cuda_build(tmp_path, *needed):
    """A torch for CUDA whose libc10_cuda.so is linked to empty libraries of these names."""
    lib = tmp_path / "lib"
    lib.mkdir()
    empty = tmp_path / "empty.cpp"
    empty.write_text("")
    for name in needed:
        subprocess.run(["g++", "-shared", "-o", lib / name, empty, f"-Wl,-soname,{name}"], check=True)
    libraries = [f"-l:{name}" for name in needed]
    command = [
        "g++",
        "-shared",
        "-o",
        lib / "libc10_cuda.so",
        empty,
        f"-L{lib}",
        "-Wl,--no-as-needed",
        *libraries,
    ]
    subprocess.run(command, check=True)
    return build.TorchBuild(root=tmp_path, version="2.14.1+cu130", cuda="13.0")


def test_a_cuda_build_on_a_shared_runtime_can_be_played(tmp_path):
    torch = _fake_cuda_build(tmp_path, "libother.so.1", "libcudart.so.13")
    assert needed_libraries(tmp_path / "lib/libc10_cuda.so")[:2] == ["libother.so.1", "libcudart.so.13"]
    assert build.obstacle(torch) is None
    assert "native" in torch.mode


def test_a_cuda_build_with_the_runtime_inside_says_so_in_one_line(tmp_path):
    trouble = build.obstacle(_fake_cuda_build(tmp_path, "libother.so.1"))
    assert "has the CUDA runtime built into it" in trouble
    assert "\n" not in trouble


@pytest.mark.parametrize("content", [b"", b"no library" * 100, b"\x7fELF\x02\x01" + b"\xff" * 200])
def test_a_library_that_is_none_is_told(tmp_path, content):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libc10_cuda.so").write_bytes(content)
    trouble = build.obstacle(build.TorchBuild(root=tmp_path, version="2.14.1", cuda="13.0"))
    assert "cannot be read" in trouble


def test_each_mode_has_its_sources():
    hooks, no_runtime = build.sources(native=False)
    native, runtime = build.sources(native=True)
    names = {path.name for path in (*hooks, *native, *runtime)}
    assert names == {path.name for path in build.SOURCES.glob("*.cpp")}
    assert no_runtime == []
    assert {"guard.cpp", "blocks.cpp"} <= {path.name for path in hooks} - {path.name for path in native}
    assert {"native_blocks.cpp"} <= {path.name for path in native} - {path.name for path in hooks}
