"""Read the interface of Transformer Engine's compiled module from its sources, compare versions, update the table.

    python scripts/te_signatures.py 2.13=PATH 2.14=PATH …            what each adds, removes, changes
    python scripts/te_signatures.py --write 2.8=PATH 2.9=PATH …      write integrations/transformer_engine/signatures.json

PATH is an unpacked source distribution of transformer_engine_torch (PyPI) or a checkout of NVIDIA/TransformerEngine; all
versions of the table are given when it is written. A checkout of another version is `git worktree add ../te-2.13 v2.13`.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import msgspec

from prism_plugins.integrations.transformer_engine import signatures
from prism_plugins.integrations.transformer_engine.signatures import Change, Interface, Table, difference

SOURCE = "csrc/extensions/pybind.cpp, csrc/extensions.h and common/util/pybind_helper.h of transformer_engine_torch"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("versions", nargs="+", metavar="VERSION=PATH")
    parser.add_argument("--write", action="store_true", help="write the table")
    arguments = parser.parse_args()
    interfaces: dict[str, Interface] = {}
    for item in arguments.versions:
        version, _, path = item.partition("=")
        interfaces[version] = read_interface(Path(path))
    changes: dict[str, Change] = {}
    previous = Interface()
    for version, interface in interfaces.items():
        changes[version] = difference(previous, interface)
        print(f"{version}: {len(interface.functions)} functions, {len(interface.enums)} enums")
        if previous.functions:
            describe(previous, interface)
        previous = interface
    if arguments.write:
        target = Path(signatures.__file__).with_name("signatures.json")
        text = msgspec.json.encode(Table(source=SOURCE, versions=changes))
        target.write_bytes(
            msgspec.json.format(text, indent=1).replace(b'\n     "', b' "').replace(b"\n    ]", b"]") + b"\n"
        )
        print(f"wrote {target}")
    return 0


def describe(old: Interface, new: Interface) -> None:
    """Print what a version changed."""
    print("  added  ", ", ".join(sorted(set(new.functions) - set(old.functions))) or "-")
    print("  removed", ", ".join(sorted(set(old.functions) - set(new.functions))) or "-")
    for name in sorted(set(old.functions) & set(new.functions)):
        before, after = old.functions[name], new.functions[name]
        if before != after:
            plus = [a for a in after if a not in before]
            minus = [a for a in before if a not in after]
            print(f"  changed {name}: +{plus} -{minus}" + ("" if plus or minus else " (order)"))
    print("  enums  ", ", ".join(k for k in new.enums if new.enums[k] != old.enums.get(k)) or "-")


def read_interface(root: Path) -> Interface:
    """The interface that the sources under ``root`` declare."""
    places = (root, root / "transformer_engine" / "pytorch")
    base = next((p for p in places if (p / "csrc/extensions/pybind.cpp").exists()), None)
    if base is None:
        sys.exit(f"{root}: no csrc/extensions/pybind.cpp; neither a source distribution nor a checkout")
    helper = next(
        p
        for p in (root / "common_headers/common", root / "transformer_engine/common")
        if (p / "util/pybind_helper.h").exists()
    )
    bindings = _code(base / "csrc/extensions/pybind.cpp")
    shared = _code(helper / "util/pybind_helper.h").replace("\\\n", "\n")
    declared = _declarations(_code(base / "csrc/extensions.h"))
    functions: dict[str, tuple[str, ...]] = {}
    enums: dict[str, tuple[str, ...]] = {}
    classes: list[str] = []
    for source in (bindings, shared):
        for name, body in re.findall(r'm\.def\(\s*"(\w+)"\s*,(.*?)\)\s*;', source, flags=re.S):
            target = re.match(r"\s*&?([\w:]+)", body)
            cpp_name = target[1].split("::")[-1] if target else name
            named = tuple(re.findall(r'py::arg\("(\w+)"\)', body))
            functions[name] = named or declared.get(cpp_name, declared.get(name, ()))
        for name, body in re.findall(r'enum_<[\w:]+>\(\s*m,\s*"(\w+)"(.*?);', source, flags=re.S):
            enums[name] = tuple(re.findall(r'\.value\(\s*"(\w+)"', body))
        classes += re.findall(r'py::class_<[^;]*?>\(\s*m,\s*"(\w+)"', source, flags=re.S)
    return Interface(functions=functions, enums=enums, classes=tuple(sorted(set(classes))))


def _code(path: Path) -> str:
    """A source without comments."""
    return re.sub(r"//[^\n]*", "", re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.S))


def _declarations(header: str) -> dict[str, tuple[str, ...]]:
    """Parameter names of every function declared in a header."""
    found = {}
    for name, parameters in re.findall(r"\b(\w+)\s*\(((?:[^()]|\([^()]*\))*)\)\s*;", header):
        words = [re.search(r"(\w+)\s*$", re.sub(r"=.*", "", p).strip()) for p in _split(parameters)]
        found[name] = tuple(word[1] for word in words if word)
    return found


def _split(parameters: str) -> list[str]:
    """At the commas outside brackets."""
    parts, depth, current = [], 0, ""
    for c in parameters:
        depth += (c in "<({[") - (c in ">)}]")
        if c == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += c
    return [*parts, current] if current.strip() else parts


if __name__ == "__main__":
    sys.exit(main())
