"""Packs: what a file holds, which files are refused, and how the cache serves from them."""

import hashlib
import os
import random
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.served_by_pack import forget_packs

import outblas
from outblas.base import cache, pack
from outblas.base.compiling import CompileForbidden
from outblas.base.facts import digest
from outblas.base.pack import PackError
from outblas.call import warm

COMMON = {"arch": "sm_90a", "options": "", "machine": "x86_64", "dsl": "4", "cuda": 12}
COMMON |= {"tvm_ffi": "0"}
Object = tuple[dict[str, object], bytes]
SIZELESS = (
    b'{"about": {}, "toolchains": {"dsl": {}, "triton": {}}, "tables": [], '
    b'"objects": [{"name": "", "kernel": "", "sha256": "", "size": Infinity}]}'
)
NAMELESS = (
    b'{"about": {}, "toolchains": {"dsl": {}, "triton": {}}, "objects": [], '
    b'"tables": [{"sha256": "", "size": 0}]}'
)
NO_TABLES = b'{"about": {}, "objects": [], "toolchains": {"dsl": {}, "triton": {}}}'


def facts(kernel: str, source: str = "s") -> dict[str, Any]:
    return {"kernel": kernel, "dtypes": ("bfloat16", "float32"), "source": source, **COMMON}


OBJECTS: list[Object] = [
    (facts("one"), b"first" * 40),
    (facts("two"), b""),
    (facts("three"), bytes(range(256))),
]
TABLES = {"shipped/one.json": b"{" * 50, "own/none.json": b""}


@pytest.fixture(autouse=True)
def _no_packs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.delenv("OUTBLAS_PACK", raising=False)
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path / "cache"))
    forget_packs()
    yield
    forget_packs()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A pack of three objects and two tables."""
    path = tmp_path / "three.outblas"
    pack.write(path, {"gpu": "H100"}, OBJECTS, TABLES)
    return path


# ---- the file
def test_a_pack_has_what_was_written(file: Path) -> None:
    found = pack.read(file)

    assert {name: found.code(name) for name in found.objects} == {
        digest(each): code for each, code in OBJECTS
    }
    assert {name: found.table(name) for name in found.tables} == TABLES
    assert found.about == {"gpu": "H100"}
    assert found.toolchain == {**COMMON, "source": "s"}
    assert found.problems() == []


def refusal(path: Path) -> str:
    """Why a pack is refused, when it is read or when its objects are; "" if it is not."""
    try:
        return "; ".join(pack.read(path).problems())
    except PackError as error:
        return str(error)


def test_every_single_byte_that_changes_is_refused(file: Path) -> None:
    whole = file.read_bytes()
    generator = random.Random(0)
    positions = [*range(len(pack.MAGIC) + 48), *generator.choices(range(len(whole)), k=300)]

    accepted = []
    for position in positions:
        changed = bytearray(whole)
        changed[position] ^= 1 << generator.randrange(8)
        file.write_bytes(changed)
        if not refusal(file):
            accepted.append(position)

    assert accepted == []


@pytest.mark.parametrize("manifest", [b"[]", b"{", b"\xff", SIZELESS, NAMELESS, NO_TABLES])
def test_a_manifest_of_another_form_is_refused(manifest: bytes, tmp_path: Path) -> None:
    path = tmp_path / "strange"
    head = pack.MAGIC + hashlib.sha256(manifest).digest() + len(manifest).to_bytes(8, "big")
    path.write_bytes(head + manifest)

    assert "the manifest is not that of a pack" in refusal(path)


@pytest.mark.parametrize("kept", [0, 55, -1])
def test_a_pack_that_was_cut_off_is_refused(kept: int, file: Path) -> None:
    file.write_bytes(file.read_bytes()[:kept])

    assert refusal(file)


def test_objects_of_two_toolchains_are_no_pack(tmp_path: Path) -> None:
    with pytest.raises(PackError, match="objects differ in source: a, b"):
        pack.write(tmp_path / "both", {}, [(facts("x", "a"), b""), (facts("y", "b"), b"")])

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("there_before", [False, True])
def test_a_pack_whose_writing_fails_is_not_there_in_part(
    there_before: bool, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError("No space left on device")

    path = file if there_before else tmp_path / "new"
    before = path.read_bytes() if there_before else None
    monkeypatch.setattr(os, "fsync", full)

    with pytest.raises(OSError, match="No space left"):
        pack.write(path, {}, OBJECTS[:1])

    assert (path.read_bytes() if path.exists() else None) == before
    assert {each.name for each in tmp_path.iterdir()} <= {file.name}


# ---- whom a pack is taken from


def test_a_link_stands_for_the_pack_that_it_leads_to(file: Path, tmp_path: Path) -> None:
    """As a volume of Kubernetes has it: a link into a folder that is a link."""
    (tmp_path / "data").symlink_to(tmp_path)
    link = tmp_path / "linked.outblas"
    link.symlink_to(Path("data") / file.name)

    assert pack.read(link).objects == pack.read(file).objects
    file.chmod(0o666)
    assert "can be written by others" in refusal(link)


# ---- serving
def save(code: bytes, path: Path) -> None:
    path.write_bytes(code)


def fetch(name: str, built: bytes = b"built", changes: dict[str, Any] | None = None) -> bytes:
    """The object of a kernel, which is `built` where it has to be."""
    return cache.fetch(facts(name) | (changes or {}), build=lambda: built, save=save, load=bytes)


def test_a_kernel_comes_from_a_pack_and_writes_nothing(file: Path, tmp_path: Path) -> None:
    outblas.load_pack(file)

    assert [fetch(str(each["kernel"])) for each, _ in OBJECTS] == [code for _, code in OBJECTS]
    assert not (tmp_path / "cache").exists()


def test_calls_are_planned_again_after_a_pack_was_loaded(file: Path) -> None:
    """Torch computes a call whose kernel may not be compiled, until a pack has it."""
    a, b = torch.ones(2, 3), torch.ones(3, 4)
    call = warm.Kind.MM, ("mm",), a, b
    entry = warm.find(*call)
    assert entry is not None
    assert entry.keep("torch computes it")

    outblas.load_pack(file)

    entry = warm.find(*call)
    assert entry is not None
    assert entry.plan is None


def test_packs_are_asked_in_the_order_in_which_they_were_loaded(file: Path, tmp_path: Path) -> None:
    pack.write(tmp_path / "second", {}, [(facts("one"), b"second"), (facts("four"), b"fourth")])
    outblas.load_pack(file)
    outblas.load_pack(tmp_path / "second")

    assert (fetch("one"), fetch("four")) == (OBJECTS[0][1], b"fourth")


def test_a_pack_of_the_environment_that_cannot_be_used_is_named_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OUTBLAS_PACK", "/nonexistent/x.outblas")

    with pytest.warns(RuntimeWarning, match="OUTBLAS_PACK is not used: .*No such file") as said:
        assert (fetch("one"), fetch("two")) == (b"built", b"built")

    assert len(said) == 1


def test_an_object_that_was_altered_is_built_instead(file: Path) -> None:
    whole = bytearray(file.read_bytes())
    whole[pack.read(file).objects[digest(OBJECTS[0][0])].offset + 4] ^= 1
    file.write_bytes(whole)
    outblas.load_pack(file)

    with pytest.warns(RuntimeWarning, match="the code of one is not what was packed") as said:
        found = fetch("one"), fetch("three")

    assert found == (b"built", OBJECTS[2][1])
    assert len(said) == 1


def test_a_pack_of_other_versions_is_named_once_and_kernels_are_built(file: Path) -> None:
    outblas.load_pack(file)

    with pytest.warns(RuntimeWarning, match=r"version of the CuTe DSL \(4, here 5\)") as said:
        assert [fetch(name, changes={"dsl": "5"}) for name in ("one", "two")] == [b"built"] * 2

    assert len(said) == 1


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"cuda": 13, "tvm_ffi": "1"}, OBJECTS[0][1]),
        ({"cuda": 11}, b"built"),
        ({"machine": "aarch64"}, b"built"),
    ],
    ids=["a newer CUDA", "an older CUDA", "another machine"],
)
@pytest.mark.filterwarnings("ignore:outblas. .*it was built with another version of")
def test_a_kernel_serves_newer_drivers(changes: dict[str, Any], code: bytes, file: Path) -> None:
    outblas.load_pack(file)

    assert fetch("one", changes=changes) == code


def test_packs_in_the_package_serve_last_and_say_nothing_of_other_versions(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "SHIPPED", tmp_path)
    pack.write(tmp_path / "b.pack", {}, [(facts("four"), b"shipped")])
    pack.write(tmp_path / "c.pack", {}, [(facts("one"), b"shipped"), (facts("five"), b"5")])
    outblas.load_pack(file)

    assert [fetch(name) for name in ("one", "four", "five")] == [OBJECTS[0][1], b"shipped", b"5"]
    forget_packs()
    assert fetch("four", changes={"dsl": "5"}) == b"built"


def test_a_kernel_that_cannot_be_loaded_from_a_pack_is_built(file: Path) -> None:
    outblas.load_pack(file)
    calls = []

    def load(code: bytes) -> bytes:
        calls.append(code)
        if len(calls) == 1:
            raise OSError("no such symbol")
        return calls[-1]

    with pytest.warns(RuntimeWarning, match="kernel cannot be loaded here: one: no such symbol"):
        found = cache.fetch(
            facts("one"),
            build=lambda: b"built",
            save=save,
            load=load,
        )

    assert (found, calls[0]) == (b"built", OBJECTS[0][1])


# ---- where nothing may be compiled
@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBLAS_COMPILE", "never")


def test_a_kernel_needs_no_folder_of_temporary_files(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container that can only be read may have none."""

    def none() -> str:
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    outblas.load_pack(file)

    assert fetch("one") == OBJECTS[0][1]


@pytest.mark.usefixtures("never")
def test_what_is_nowhere_is_not_built(file: Path) -> None:
    outblas.load_pack(file)

    with pytest.raises(CompileForbidden, match="neither a pack nor the cache has four"):
        fetch("four")


def test_threads_wait_for_the_pack_of_the_environment(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTBLAS_PACK", str(file))
    begun, opened = threading.Event(), threading.Event()
    read = pack.read

    def slowly(path: Path) -> pack.Pack:
        begun.set()
        assert opened.wait(10)
        return read(path)

    monkeypatch.setattr(pack, "read", slowly)
    found: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: found.append(fetch("one")), daemon=True) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    assert begun.wait(10)
    opened.set()
    for thread in threads:
        thread.join(10)

    assert found == [OBJECTS[0][1]] * 3


def test_a_value_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBLAS_COMPILE", "no")

    with pytest.raises(
        ValueError, match="OUTBLAS_COMPILE is 'no', expected one of background, block, never"
    ):
        fetch("four")
