"""The line of a call."""

from __future__ import annotations

from prism_plugins.collectives.call_site import call_site


def test_the_innermost_frame_outside_of_torch_and_prism() -> None:
    namespace = {"__name__": "torch.wrapper", "call_site": call_site}
    exec(compile("def wrap():\n    return call_site()\n", "/x/torch/wrapper.py", "exec"), namespace)
    path, _, line = namespace["wrap"]().rpartition(":")
    assert path.endswith("test_call_site.py")
    assert int(line) > 10


def test_paths_of_packages_begin_with_the_package() -> None:
    namespace = {"__name__": "megatron.core.mappings", "call_site": call_site}
    source = "\n\ndef reduce():\n    return call_site()\n"
    exec(compile(source, "/opt/site/megatron/core/mappings.py", "exec"), namespace)
    assert namespace["reduce"]() == "megatron/core/mappings.py:4"


def test_decorators_that_only_pass_calls_on_are_no_site() -> None:
    namespace = {
        "__name__": "typing_extensions",
        "call_site": call_site,
    }  # torch deprecates functions with it
    exec(compile("def wrapper():\n    return call_site()\n", "/x/typing_extensions.py", "exec"), namespace)
    assert "test_call_site.py" in namespace["wrapper"]()
