"""Reading and running `.pte` files without ExecuTorch: `pytest tests/runtime/test_program.py`."""

from __future__ import annotations

import gc
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toy_programs import DTYPES, Toy, build

from backend import native
from backend.graph import ShapeError
from backend.runtime import load
from backend.runtime.flatbuffer import FlatbufferError, Reader
from backend.runtime.module import Module
from backend.runtime.program import ProgramError, TensorMeta, read_program
from recipes.recipe import UserError
from zoo.program import Program

NAMES = ("add", "bias", "dtypes", "mixed", "plain", "portable", "state", "symint", "unnamed")


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory)


def rows(count: int) -> np.ndarray:
    return np.arange(count * 3, dtype=np.float32).reshape(count, 3)


def direct(path: Path) -> Module:
    return Module(read_program(path), Toy, dict)


# --- what is read ---------------------------------------------------------------------------------------------------


def test_metadata(programs: Path) -> None:
    info = read_program(programs / "add.pte").methods["forward"]
    x, y = (info.values[index] for index in info.inputs)
    assert x == y == TensorMeta("float32", (64, 3), (0, 1), "bounded")
    (call,) = info.calls
    assert (call.backend_id, bytes(call.blob)) == ("ZooWebGPU", b"add:2")
    assert (call.inputs, call.outputs) == (info.inputs, info.outputs)
    assert info.undelegated is None


def test_dtypes_and_named_data(programs: Path) -> None:
    info = read_program(programs / "dtypes.pte").methods["forward"]
    metas = [info.values[index] for index in info.inputs]
    assert [meta.dtype for meta in metas if isinstance(meta, TensorMeta)] == list(DTYPES)
    file = read_program(programs / "bias.pte")
    assert set(file.keys) == {"seen", "bias"}
    np.testing.assert_array_equal(np.frombuffer(file.get_data("bias"), np.float32), [0, 1, 2])
    with pytest.raises(KeyError):
        file.get_data("nothing")


@pytest.mark.parametrize("name", NAMES)
def test_reader_agrees_with_executorch(programs: Path, name: str) -> None:
    from executorch.runtime import Runtime

    native.register()
    file, program = read_program(programs / f"{name}.pte"), Runtime.get().load_program(programs / f"{name}.pte")
    assert set(file.methods) == program.method_names
    for method, info in file.methods.items():
        meta = program.metadata(method)
        assert (len(info.inputs), len(info.outputs)) == (meta.num_inputs(), meta.num_outputs())
        for position, index in enumerate(info.inputs):
            value, theirs = info.values[index], meta.input_tensor_meta(position)
            assert isinstance(value, TensorMeta)
            assert value.sizes == tuple(theirs.sizes())
        for position, index in enumerate(info.outputs):
            value, theirs = info.values[index], meta.output_tensor_meta(position)
            assert isinstance(value, TensorMeta)
            assert value.sizes == tuple(theirs.sizes())


def test_memory_and_file_read_the_same(programs: Path) -> None:
    data = bytearray((programs / "bias.pte").read_bytes())
    from_memory, from_file = read_program(data), read_program(programs / "bias.pte")
    del data
    gc.collect()
    assert bytes(from_memory.get_data("bias")) == bytes(from_file.get_data("bias"))
    assert from_memory.methods == from_file.methods


# --- running --------------------------------------------------------------------------------------------------------


def test_direct_runs(programs: Path) -> None:
    with direct(programs / "add.pte") as module:
        for count in (7, 64, 1, 0):
            (out,) = module.run("forward", rows(count), rows(count))
            np.testing.assert_array_equal(out, 2 * rows(count))
    with pytest.raises(ValueError, match="closed"):
        module.run("forward", rows(1), rows(1))


def test_direct_shares_state_within_a_load(programs: Path) -> None:
    zero = np.zeros(4, np.float32)
    with direct(programs / "state.pte") as first, direct(programs / "state.pte") as second:
        assert set(first.methods) == {"read", "write"}
        first.run("write", zero + 7)
        assert (first.run("read", zero)[0][0], second.run("read", zero)[0][0]) == (7, -1)


def test_output_that_is_an_input_or_a_constant(programs: Path) -> None:
    x = np.ones((2, 2), np.float32)
    programs_ = [direct(programs / "plain.pte"), Program.load(programs / "plain.pte")]
    for program in programs_:
        for _ in range(2):
            same, constant = program.run("forward", x)
            np.testing.assert_array_equal(same, np.ones((2, 2)))
            np.testing.assert_array_equal(constant, [0, 1, 2])
            same[:] = 5
            constant[:] = 5
            assert (x == 1).all()
        program.close()


@pytest.mark.parametrize(
    ("name", "reason"), [("portable", "aten::mul.out"), ("mixed", "aten::mul.out"), ("symint", "sym_size")]
)
def test_direct_refuses_what_is_not_ours(programs: Path, name: str, reason: str) -> None:
    with pytest.raises(ProgramError, match=f"needs ExecuTorch's runtime: forward .*{reason}"):
        load(programs / f"{name}.pte")
    with pytest.raises(UserError, match=reason):
        Program.load(programs / f"{name}.pte", "direct")


@pytest.mark.parametrize("through", ["direct", "executorch"])
@pytest.mark.parametrize(
    ("name", "shapes", "message"),
    [
        ("add", [(65, 3), (65, 3)], "input 0, dimension 0 is 65, allowed up to 64"),
        ("add", [(2, 3), (2, 96)], "input 1, dimension 1 is 96, allowed up to 3"),  # fewer elements than the bound
        ("add", [(6,), (2, 3)], "input 0 has 1 dimensions, expected 2"),
        ("add", [(2, 3)], "1 inputs given, the method takes 2"),
        ("bias", [(3, 2)], "input 0, dimension 0 is 3, expected 2"),
    ],
)
def test_each_dimension_is_checked(
    programs: Path, through: str, name: str, shapes: list[tuple[int, ...]], message: str
) -> None:
    path = programs / f"{name}.pte"
    program = direct(path) if through == "direct" else Program.load(path)
    with pytest.raises(ShapeError, match=message):
        program.run("forward", *(np.zeros(shape, np.float32) for shape in shapes))
    program.close()


def test_dtype_and_method_are_checked(programs: Path) -> None:
    with Program.load(programs / "add.pte") as program:
        with pytest.raises(ShapeError, match="input 0 is float64, expected float32"):
            program.run("forward", np.zeros((2, 3)), np.zeros((2, 3)))
        with pytest.raises(KeyError, match="no method 'backward': the program has forward"):
            program.run("backward")


def test_nothing_of_torch_is_imported(programs: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['executorch'] = None\n"
        "sys.path.insert(0, 'tests/runtime')\n"
        "import numpy as np, backend.runtime\n"
        "from backend.runtime.module import Module\nfrom backend.runtime.program import read_program\n"
        "from toy_programs import Toy\n"
        f"m = Module(read_program({str(programs / 'bias.pte')!r}), Toy, dict)\n"
        "print(m.run('forward', np.ones((2, 3), np.float32))[0].sum())\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "12.0\n"), done.stderr


# --- files that are not what they should be -------------------------------------------------------------------------


def test_one_clear_line_for_each_bad_file(programs: Path, tmp_path: Path) -> None:
    good = (programs / "bias.pte").read_bytes()
    newer = bytearray(good)
    newer[4:8] = b"ET13"
    cases = {
        "missing": (None, "cannot read .*: No such file"),
        "empty": (b"", "not a .pte file: it is empty"),
        "text": (b"#!/bin/sh\necho this is something else\n", "not a .pte file"),
        "short": (good[:20], "truncated: 20 bytes"),
        "cut": (good[:-1], f"truncated: {len(good) - 1} of {len(good)} bytes"),
        "newer": (bytes(newer), "another version of ExecuTorch .*ET13"),
    }
    for name, (data, message) in cases.items():
        path = tmp_path / f"{name}.pte"
        if data is not None:
            path.write_bytes(data)
        for runtime in ("executorch", "direct"):
            with pytest.raises(UserError, match=message) as caught:
                Program.load(path, runtime)
            assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="cannot read"):
        Program.load(tmp_path)
    with pytest.raises(UserError, match="unknown runtime 'other'"):
        Program.load(programs / "add.pte", "other")


@pytest.mark.parametrize("name", NAMES)
def test_every_prefix_is_refused(programs: Path, name: str) -> None:
    data = (programs / f"{name}.pte").read_bytes()
    _, _, size, base, segment_bytes = struct.unpack_from("<4sIQQQ", data, 8)
    for length in range(max(size, base + segment_bytes)):
        with pytest.raises(ProgramError, match=r"^(not a \.pte file|truncated: )"):
            read_program(data[:length])


@settings(max_examples=600, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bits_never_escape(programs: Path, data: st.DataObject) -> None:
    good = bytearray((programs / f"{data.draw(st.sampled_from(NAMES))}.pte").read_bytes())
    for position in data.draw(st.lists(st.integers(0, 8 * len(good) - 1), min_size=1, max_size=6)):
        good[position // 8] ^= 1 << position % 8
    consume(bytes(good))


@settings(max_examples=300, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_overwritten_words_never_escape(programs: Path, data: st.DataObject) -> None:
    good = bytearray((programs / f"{data.draw(st.sampled_from(NAMES))}.pte").read_bytes())
    place = data.draw(st.integers(0, len(good) // 4 - 1)) * 4
    word = data.draw(st.one_of(st.integers(-64, 64), st.sampled_from([2**31 - 1, -(2**31), 2**30])))
    struct.pack_into("<i", good, place, word)
    consume(bytes(good))


def consume(data: bytes) -> None:
    """Reads all of a program; `ProgramError` is the one way in which that may fail."""
    try:
        file = read_program(data)
        for key in file.keys:
            bytes(file.get_data(key))
        for info in file.methods.values():
            for call in info.calls:
                bytes(call.blob)
            for value in info.values.values():
                if isinstance(value, TensorMeta) and value.constant is not None and value.is_contiguous:
                    value.array()
    except ProgramError as error:
        assert str(error) and "\n" not in str(error)


def test_knot_of_tables_ends() -> None:
    # One table whose field 0 is a list of a thousand references to the table itself.
    count = 1000
    body = struct.pack("<IHHHHiI", 12, 6, 8, 4, 0, 8, 4) + struct.pack("<I", count)
    body += b"".join(struct.pack("<i", 12 - (len(body) + 4 * index)) for index in range(count))
    table = Reader(memoryview(body)).root()

    def walk(item: object, depth: int) -> int:
        return sum(walk(child, depth - 1) for child in item.tables(0)) + 1 if depth else 1  # type: ignore[attr-defined]

    with pytest.raises(FlatbufferError):
        walk(table, 5)


def test_damaged_files_do_not_end_the_process(programs: Path, tmp_path: Path) -> None:
    """ExecuTorch gets what our reader lets through: it may refuse to load it, but must survive that.

    (Damage within the calls of ExecuTorch's own operators is seen by nobody before they run.)
    """
    code = (
        "import sys, random; sys.path.insert(0, 'tests/runtime')\n"
        "from pathlib import Path\nfrom toy_programs import Toy\nfrom backend import native\n"
        "from recipes.recipe import UserError\nfrom zoo.program import Program\n"
        "native.set_delegate_factory(Toy, dict); chance = random.Random(0); refused = 0\n"
        f"for name in ('bias', 'dtypes', 'state'):\n"
        f"    good = (Path({str(programs)!r}) / f'{{name}}.pte').read_bytes()\n"
        f"    path = Path({str(tmp_path / 'damaged.pte')!r})\n"
        "    for _ in range(100):\n"
        "        data = bytearray(good); place = chance.randrange(8 * len(data)); data[place // 8] ^= 1 << place % 8\n"
        "        path.write_bytes(data)\n"
        "        try:\n"
        "            program = Program.load(path)\n"
        "            for method in program.methods: program._engine._program.load_method(method)\n"
        "            program.close()\n"
        "        except (UserError, RuntimeError): refused += 1\n"
        "print('survived', refused > 10)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "survived True\n"), done.stderr[-2000:]
