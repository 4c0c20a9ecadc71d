"""Compile every Triton kernel for GPUs that need not be there, and write what each takes into docs/tables/kernels.md.

    python benchmarks/compile_kernels.py

A configuration is a kernel, element types, which optional arguments are given, and block sizes. Registers, stack and
shared memory are read from the machine code. A kernel without local arrays uses a stack only to spill registers, so
a stack means spills.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from vllm_eesd.kernels.gpu import (
    choose_tokens,
    draft_inputs,
    exit_head,
    keep_equal,
    kv_fill,
    ngram,
    rejection,
    rejection_statistics,
    shared_draw,
)

from vllm_eesd.round.ngram import MAX_MATCH, MAX_SEARCHED

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "tables" / "kernels.md"
OPEN, CLOSE = "<!-- compiled -->", "<!-- /compiled -->"
CAPABILITIES = (80, 90, 100)
CUOBJDUMP = Path(triton.backends.__file__).parent / "nvidia" / "bin" / "cuobjdump"

# Element types of the arguments that do not depend on the model's.
POINTERS = {
    "fp32": "temperature maxima seconds sums top1_prob blocks refused local_score k_scale v_scale "
    "draft_confidences confidences drawn_confidences",
    "i1": "chosen taken shares_noise",
    "i32": "cu_num_logits argmax arrived num_sampled local_token columns best texts num_tokens found "
    "input_ids seq_lens query_start_loc target_seq_lens target_query_start_loc num_rejected num_blocks",
    "i64": "d2t seeds positions token_ids idx_mapping draft_sampled sampled slot_mapping drafts draft_tokens "
    "position_limit last_rows target_idx_mapping last_sampled tokens drawn",
}
TYPE_OF = {f"{name}_ptr": "*" + kind for kind, names in POINTERS.items() for name in names.split()}
# Arguments that are tuples of arguments.
TUPLES = {"inputs": rejection_statistics.Inputs}


class Case(NamedTuple):
    """One configuration."""

    name: str
    kernel: object  # a triton.jit function
    model_type: str  # of logits, weights, keys: bf16, fp16, fp32
    constexprs: dict  # block sizes, and None for the optional arguments that are not given
    num_warps: int = 4
    num_stages: int = 3
    types: dict = {}  # arguments of a type of their own


class Resources(NamedTuple):
    """What one compiled kernel takes."""

    registers: int  # per thread
    stack_bytes: int  # per thread; not 0 means spilled registers
    shared_bytes: int  # per program


def absent(*names: str) -> dict:
    return dict.fromkeys((f"{name}_ptr" for name in names), None)


def exit_head_cases() -> list[Case]:
    """Every tile size with every weight type; logits that are there already; the merge of the tiles."""
    cases = []
    for model, weight_bytes in (("bf16", 2), ("fp16", 2), ("fp32", 4)):
        for tile in dict.fromkeys(exit_head.tiles(num_tokens, weight_bytes) for num_tokens in (1, 16, 32, 64)):
            blocks = {"BLOCK_T": tile.block_t, "BLOCK_V": tile.block_v, "BLOCK_H": tile.block_h}
            name = f"exit_head {model} {tile.block_t}x{tile.block_v}x{tile.block_h}"
            cases.append(Case(name, exit_head._exit_head_kernel, model, blocks, tile.num_warps, tile.num_stages))
    for model in ("bf16", "fp32"):
        blocks = {"BLOCK_V": choose_tokens.CHOOSE_BLOCK}
        cases.append(Case(f"choose_tokens {model}", choose_tokens._choose_kernel, model, blocks))
    for block, num_warps in ((64, 4), (1024, 4), (8192, 16)):
        name = f"exit_head reduce {block}"
        cases.append(Case(name, choose_tokens._reduce_kernel, "fp32", {"BLOCK": block}, num_warps))
    return cases


def rejection_cases() -> list[Case]:
    """One-hot and full drafts, token by token and as blocks."""
    cases = []
    statistics = {"BLOCK": rejection_statistics.STATISTICS_BLOCK}
    resample = {"BLOCK": rejection.RESAMPLE_BLOCK, "TILES_PADDED": 256}
    padded = {"K_PADDED": 8, "BLOCKS_PADDED": 32}
    for model in ("bf16", "fp32"):
        for way, given in (("one-hot", absent("draft_logits")), ("full", {})):
            name, kernel = f"rejection statistics {model} {way}", rejection_statistics.statistics_kernel
            cases.append(Case(name, kernel, model, statistics | given, 8))
            name, kernel = f"rejection resample {model} {way}", rejection._resample_kernel
            cases.append(Case(name, kernel, model, resample | given))
            for judged in ("token", "block"):
                constexprs = {"BLOCK_VERIFICATION": judged == "block"} | padded | given
                name, kernel = f"rejection accept {model} {way} {judged}", rejection._accept_kernel
                cases.append(Case(name, kernel, model, constexprs, 1))
        kernel = rejection_statistics.mass_kernel
        cases.append(Case(f"rejection mass {model}", kernel, model, statistics | padded, 8))
    for model in ("bf16", "fp32"):
        draw = {"BLOCK": shared_draw.DRAW_BLOCK}
        cases.append(Case(f"shared_draw {model}", shared_draw._draw_kernel, model, draw))
    cases.append(Case("shared_draw reduce", shared_draw._reduce_kernel, "fp32", {"TILES_PADDED": 128}))
    kernel = keep_equal._keep_equal_kernel
    for whose, given in (("all", absent("chosen")), ("some", {})):
        cases.append(Case(f"keep_equal of {whose}", kernel, "fp32", {"WIDTH_PADDED": 8} | given, 1))
    return cases


def kv_fill_cases() -> list[Case]:
    """Head sizes of 64 and 128, every cache type."""
    cases = []
    for model, cache, limit in (
        ("bf16", "bf16", 0.0),
        ("fp16", "fp16", 0.0),
        ("fp32", "fp32", 0.0),
        ("bf16", "fp8e4nv", 448.0),
        ("bf16", "fp8e5", 57344.0),
    ):
        for head_size, is_neox in ((64, False), (128, True)):
            constexprs = {"HEAD_SIZE": head_size, "HEAD_SIZE_V": head_size, "ROTARY_DIM": head_size, "BLOCK_SIZE": 16}
            constexprs |= {"IS_NEOX": is_neox, "LIMIT": limit, "BLOCK_K": head_size, "BLOCK_V": head_size}
            constexprs |= {} if limit else absent("k_scale", "v_scale")
            constexprs |= {"k_element_stride": 1, "v_element_stride": 1}  # as Triton specialises it
            types = {"key_cache_ptr": f"*{cache}", "value_cache_ptr": f"*{cache}"}
            name = f"kv_fill {model} into {cache}, {head_size} {'halves' if is_neox else 'pairs'}"
            cases.append(Case(name, kv_fill._kv_fill_kernel, model, constexprs, 1, types=types))
    return cases


def ngram_cases() -> list[Case]:
    """The search of long texts, and drafts put where others stood, their logits too."""
    sizes = {"MAX_SEARCHED": MAX_SEARCHED}
    scan = sizes | {"MAX_MATCH": MAX_MATCH, "BLOCK": ngram.SCAN_BLOCK}
    finish, put = sizes | {"K_PADDED": 8, "BLOCKS_PADDED": 32}, {"BLOCK": ngram.VOCAB_BLOCK}
    cases = [Case("ngram scan", ngram._scan_kernel, "fp32", scan)]
    cases.append(Case("ngram finish", ngram._finish_kernel, "fp32", finish, 1))
    cases.append(Case("ngram put tokens", ngram._put_kernel, "fp32", put | absent("draft_logits") | {"LOWEST": 0.0}))
    for model, lowest in (("bf16", -3.38e38), ("fp32", -3.4e38)):
        cases.append(Case(f"ngram put {model} logits", ngram._put_kernel, model, put | {"LOWEST": lowest}))
    return cases


def draft_input_cases() -> list[Case]:
    """The inputs of a round, and of its next draft step."""
    rows, types = {"ROWS": draft_inputs.ROWS}, {"columns_ptr": "*i64"}
    names = ("prepare", draft_inputs._prepare_kernel), ("advance", draft_inputs._advance_kernel)
    return [Case(f"draft inputs {name}", kernel, "fp32", rows, types=types) for name, kernel in names]


def all_cases() -> list[Case]:
    return exit_head_cases() + rejection_cases() + kv_fill_cases() + ngram_cases() + draft_input_cases()


def takes(case: Case, capability: int) -> bool:
    """Whether the GPU has the case's types: float8 e4m3 came with compute capability 8.9."""
    return capability >= 89 or "*fp8e4nv" not in case.types.values()


def type_of(case: Case, name: str) -> str:
    """Return the type of an argument as Triton names it."""
    if name in case.constexprs:
        return "constexpr"
    if name.endswith("_ptr"):
        return case.types.get(name) or TYPE_OF.get(name, f"*{case.model_type}")
    return "fp32" if name == "eps" else "i32"


def compile_for(case: Case, capability: int, **options: int) -> Resources:
    """Return what the kernel takes once compiled; addresses and row strides are multiples of 16, as in real models.

    Args:
        case: what to compile.
        capability: 90 for sm_90.
        options: of Triton's compiler, in addition to the case's own.
    """
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(case.kernel.arg_names):
        if name in TUPLES:
            fields = TUPLES[name]._fields
            signature[name] = TUPLES[name](*(type_of(case, field) for field in fields))
            places = {(index, place): field for place, field in enumerate(fields)}
        else:
            signature[name] = type_of(case, name)
            places = {(index,): name}
        for place, field in places.items():
            if field in case.constexprs:
                constants[place] = case.constexprs[field]
            elif field.endswith("_ptr") or "stride" in field or field == "hidden_size":
                attributes[place] = [["tt.divisibility", 16]]
    source = ASTSource(case.kernel, signature, constants, attributes)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages} | options
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        listing = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", cubin.name], capture_output=True, text=True, check=True
        ).stdout
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", listing)}
    return Resources(found["REG"], found["STACK"] + found["LOCAL"], compiled.metadata.shared)


def table(results: dict) -> str:
    """Return the Markdown table of {case name: {capability: Resources or None}}."""
    heads = " | ".join(f"sm_{capability}" for capability in CAPABILITIES)
    lines = [f"| configuration | {heads} |", "|---|" + "---|" * len(CAPABILITIES)]
    for name, by_capability in results.items():
        cells = []
        for capability in CAPABILITIES:
            taken = by_capability[capability]
            cells.append(
                "no such type" if taken is None else f"{taken.registers} / {taken.stack_bytes} / {taken.shared_bytes}"
            )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    results = {}
    for case in all_cases():
        results[case.name] = {c: compile_for(case, c) if takes(case, c) else None for c in CAPABILITIES}
        print(case.name, results[case.name], file=sys.stderr)
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(OPEN)
    caption = (
        f"Triton {triton.__version__}: registers and bytes spilled per thread, bytes of shared memory per program."
    )
    PAGE.write_text(f"{before}{OPEN}\n{caption}\n\n{table(results)}\n{CLOSE}{rest.split(CLOSE)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
