"""The ctypes declarations and headrace.h say the same."""

from __future__ import annotations

import ctypes
import re

import pytest

from headrace import _abi
from support import headers

HEADER = headers.public_header()[0]


@pytest.fixture(scope="module")
def ffi():
    return headers.parse(headers.public_header())


@pytest.fixture(scope="module")
def function_types(ffi) -> dict[str, object]:
    """name -> cffi function type, for every function the header declares."""
    declared = ffi._parser._declarations  # the only list of names that cffi keeps
    names = [key.split(" ", 1)[1] for key in declared if key.startswith("function ")]
    return {name: ffi.typeof(_pointer_spelling(declared["function " + name][0]))
            for name in names}


def _pointer_spelling(kind) -> str:
    arguments = ", ".join(a.get_c_name() for a in kind.args) or "void"
    return f"{kind.result.get_c_name()} (*)({arguments})"


def _shape(ffi, c_type) -> tuple:
    """What matters of a C type for a call: kind, size, signedness, and what it points to."""
    if c_type.kind == "void":
        return ("void",)
    if c_type.kind == "pointer":
        return ("pointer",)
    if c_type.kind == "function":
        return ("callback",) + _signature(ffi, c_type)
    if c_type.kind == "enum":
        return ("int", ffi.sizeof(c_type), _signed(ffi, c_type))
    if c_type.cname == "char":
        return ("char",)
    if c_type.kind == "primitive":
        if c_type.cname in ("float", "double"):
            return ("float", ffi.sizeof(c_type))
        return ("int", ffi.sizeof(c_type), _signed(ffi, c_type))
    if c_type.kind == "array":
        return ("array", c_type.length, _shape(ffi, c_type.item))
    assert c_type.kind == "struct", c_type
    return ("struct", ffi.sizeof(c_type))


def _signed(ffi, c_type) -> bool:
    if c_type.kind == "enum":  # hr_status crosses the border as an int; its values are small
        return True
    return int(ffi.cast(c_type, -1)) < 0


def _signature(ffi, function) -> tuple:
    return (_shape(ffi, function.result), tuple(_shape(ffi, a) for a in function.args))


def _ctypes_shape(kind) -> tuple:
    if kind is None:
        return ("void",)
    if isinstance(kind, type) and issubclass(kind, ctypes._CFuncPtr):
        return ("callback", _ctypes_shape(kind._restype_),
                tuple(_ctypes_shape(a) for a in kind._argtypes_))
    if kind in (ctypes.c_void_p, ctypes.c_char_p) or issubclass(kind, ctypes._Pointer):
        return ("pointer",)
    if issubclass(kind, ctypes.Array):
        return ("array", kind._length_, _ctypes_shape(kind._type_))
    if issubclass(kind, ctypes.Structure):
        return ("struct", ctypes.sizeof(kind))
    if kind in (ctypes.c_float, ctypes.c_double):
        return ("float", ctypes.sizeof(kind))
    if kind is ctypes.c_char:
        return ("char",)
    return ("int", ctypes.sizeof(kind), kind(-1).value < 0)


def _structs(ffi) -> list[str]:
    found = re.findall(r"^typedef struct (hr_\w+) \{", HEADER.read_text(), re.MULTILINE)
    assert len(found) >= 9
    return found


def test_every_function_is_declared_on_both_sides(function_types):
    assert set(function_types) == set(_abi.FUNCTIONS)
    text = HEADER.read_text()
    exported = set(re.findall(r"\bHR_API\b[^;]*?\b(hr_\w+)\(", text))
    assert exported == set(_abi.FUNCTIONS), "every function of the header carries HR_API"


def test_functions_agree(ffi, function_types):
    for name, function in function_types.items():
        result, arguments = _abi.FUNCTIONS[name]
        assert len(function.args) == len(arguments), f"{name}: number of arguments"
        assert _ctypes_shape(result) == _shape(ffi, function.result), f"{name}: result"
        for i, (mine, theirs) in enumerate(zip(arguments, function.args)):
            assert _ctypes_shape(mine) == _shape(ffi, theirs), f"{name}: argument {i}"


def test_pointers_point_to_the_same(ffi, function_types):
    """A pointer argument with a declared target points to a target of the same shape."""
    checked = 0
    for name, function in function_types.items():
        for i, (mine, theirs) in enumerate(zip(_abi.FUNCTIONS[name][1], function.args)):
            if isinstance(mine, type) and issubclass(mine, ctypes._Pointer):
                assert _ctypes_shape(mine._type_) == _shape(ffi, theirs.item), f"{name}: argument {i}"
                if issubclass(mine._type_, ctypes.Structure):
                    assert theirs.item.cname == mine._type_.__name__, f"{name}: argument {i}"
                checked += 1
    assert checked > 20


def test_every_struct_is_declared(ffi):
    declared = {name for name, value in vars(_abi).items()
                if isinstance(value, type) and issubclass(value, ctypes.Structure)}
    assert declared == set(_structs(ffi))


def test_structs_agree(ffi):
    for name in _structs(ffi):
        mine, theirs = getattr(_abi, name), ffi.typeof(name)
        assert [f[0] for f in mine._fields_] == [f[0] for f in theirs.fields], name
        assert ctypes.sizeof(mine) == ffi.sizeof(theirs), name
        assert ctypes.alignment(mine) == ffi.alignof(theirs), name
        for (field, kind), (_same, found) in zip(mine._fields_, theirs.fields):
            where = f"{name}.{field}"
            assert getattr(mine, field).offset == found.offset, where
            assert ctypes.sizeof(kind) == ffi.sizeof(found.type), where
            assert _ctypes_shape(kind) == _shape(ffi, found.type), where


def test_callbacks_agree(ffi):
    for name in ("hr_verify_fn", "hr_token_fn", "hr_bench_fn"):
        assert _ctypes_shape(getattr(_abi, name)) == _shape(ffi, ffi.typeof(name)), name


def test_every_constant_agrees(ffi):
    names = set(re.findall(r"\b(HR_[A-Z_]+) = \d+", HEADER.read_text()))
    names |= {n for n in vars(_abi) if n.startswith("HR_") and not n.startswith("HR_VERSION")}
    constants = {}
    for key, (kind, _qualifiers) in ffi._parser._declarations.items():
        if hasattr(kind, "enumerators") and kind.enumerators:
            constants.update(zip(kind.enumerators, kind.enumvalues))
    constants.update({k: v for k, v in ffi._parser._int_constants.items() if k.startswith("HR_")})
    assert names == set(constants)
    for name in sorted(names):
        assert getattr(_abi, name) == constants[name], name


def test_version_agrees():
    text = HEADER.read_text()
    for part in ("MAJOR", "MINOR", "PATCH"):
        written = int(re.search(rf"#define HR_VERSION_{part} (\d+)", text).group(1))
        assert getattr(_abi, f"HR_VERSION_{part}") == written


def test_library_has_every_function(headrace, build_dir):
    lib = _abi.library()
    for name in _abi.FUNCTIONS:
        assert getattr(lib, name)
    written = (_abi.HR_VERSION_MAJOR, _abi.HR_VERSION_MINOR, _abi.HR_VERSION_PATCH)
    assert headrace.version() == "%d.%d.%d" % written


def test_library_exports_nothing_else(build_dir):
    import shutil
    import subprocess

    from support.build import shared_library

    if not shutil.which("nm"):
        pytest.skip("nm is not installed")
    listing = subprocess.run(["nm", "-D", "--defined-only",
                              str(shared_library(build_dir, "headrace"))],
                             capture_output=True, text=True, check=True).stdout
    exported = {line.split()[-1] for line in listing.splitlines() if line.strip()}
    exported -= {"_init", "_fini", "_edata", "_end", "__bss_start"}
    assert exported == set(_abi.FUNCTIONS)
