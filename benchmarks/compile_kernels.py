"""Compile every Triton kernel for GPUs that need not be there, and write what each takes into docs/kernels.md.

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
from vllm_eesd.kernels import choose_tokens, exit_head, kv_fill, rejection, rejection_statistics

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "kernels.md"
OPEN, CLOSE = "<!-- compiled -->", "<!-- /compiled -->"
CAPABILITIES = (80, 90, 100)
CUOBJDUMP = Path(triton.backends.__file__).parent / "nvidia" / "bin" / "cuobjdump"

# Element types of the arguments that do not depend on the model's.
POINTERS = {
    "fp32": "weight_scale temperature exponentials statistics merged blocks refused local_score k_scale v_scale",
    "fp64": "uniforms",
    "i32": "cu_num_logits argmax arrived num_sampled num_rejected observed block_table local_token",
    "i64": "d2t seeds positions token_ids best idx_mapping draft_sampled sampled next_positions next_slots "
    "slot_mapping",
}
TYPE_OF = {f"{name}_ptr": "*" + kind for kind, names in POINTERS.items() for name in names.split()}


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


NO_SAMPLING = absent("temperature", "seeds", "positions", "exponentials", "idx_mapping")
SEEDED = absent("exponentials")
DRAWN = absent("seeds", "positions")


def exit_head_cases() -> list[Case]:
    """Every tile size with every weight type, greedy and sampled."""
    cases = []
    for weight, model, weight_bytes in (
        ("bf16", "bf16", 2),
        ("fp16", "fp16", 2),
        ("fp32", "fp32", 4),
        ("fp8e4nv", "bf16", 1),
    ):
        for num_tokens in (1, 16, 32, 64):
            tile = exit_head.tiles(num_tokens, weight_bytes)
            blocks = {"BLOCK_T": tile.block_t, "BLOCK_V": tile.block_v, "BLOCK_H": tile.block_h}
            scale = {} if weight == "fp8e4nv" else absent("weight_scale")
            for way, sampling in (("greedy", NO_SAMPLING | absent("logits_out", "d2t")), ("seeded", SEEDED)):
                name = f"exit_head {weight} {tile.block_t}x{tile.block_v}x{tile.block_h} {way}"
                types = {"weight_ptr": f"*{weight}"}
                case = Case(
                    name,
                    exit_head._exit_head_kernel,
                    model,
                    blocks | scale | sampling,
                    tile.num_warps,
                    tile.num_stages,
                    types,
                )
                if name not in [other.name for other in cases]:
                    cases.append(case)
    for model in ("bf16", "fp32"):
        for way, sampling in (("greedy", NO_SAMPLING | absent("d2t")), ("seeded", SEEDED), ("drawn", DRAWN)):
            blocks = {"BLOCK_V": choose_tokens.CHOOSE_BLOCK}
            cases.append(Case(f"choose_tokens {model} {way}", choose_tokens._choose_kernel, model, blocks | sampling))
    for block, num_warps in ((64, 4), (1024, 4), (8192, 8)):
        cases.append(
            Case(f"exit_head reduce {block}", choose_tokens._reduce_kernel, "fp32", {"BLOCK": block}, num_warps)
        )
    return cases


def rejection_cases() -> list[Case]:
    """Greedy, one-hot and full drafts, token by token and as blocks, vocabularies of 32,000 and 152,000."""
    cases = []
    no_draft, greedy = absent("draft_logits"), absent("draft_logits", "temperature", "seeds", "uniforms")
    for model in ("bf16", "fp32"):
        for way, given in (("greedy", greedy), ("one-hot", no_draft), ("full", {})):
            statistics = {"BLOCK": rejection_statistics.STATISTICS_BLOCK} | {
                k: given[k] for k in given if k[:2] in ("dr", "te")
            }
            cases.append(
                Case(
                    f"rejection statistics {model} {way}", rejection_statistics.statistics_kernel, model, statistics, 8
                )
            )
            blocks = {"BLOCK": rejection.RESAMPLE_BLOCK, "BLOCKS_PADDED": 256}
            given_noise = {k: given[k] for k in given if k != "uniforms_ptr"} | absent("exponentials")
            cases.append(
                Case(f"rejection resample {model} {way}", rejection._resample_kernel, model, blocks | given_noise)
            )
            if way == "greedy":
                verifications = (False,)
            else:
                verifications = (False, True)
            for block_verification in verifications:
                judged = "block" if block_verification else "token"
                constexprs = {"BLOCK_SIZE": 16, "BLOCK_VERIFICATION": block_verification}
                constexprs |= {"K_PADDED": 8, "BLOCKS_PADDED": 32} | given | absent("uniforms")
                cases.append(
                    Case(f"rejection accept {model} {way} {judged}", rejection._accept_kernel, model, constexprs, 1)
                )
        blocks = {"BLOCK": rejection_statistics.STATISTICS_BLOCK, "K_PADDED": 8, "BLOCKS_PADDED": 32}
        cases.append(Case(f"rejection mass {model}", rejection_statistics.mass_kernel, model, blocks, 8))
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


def all_cases() -> list[Case]:
    return exit_head_cases() + rejection_cases() + kv_fill_cases()


def takes(case: Case, capability: int) -> bool:
    """Whether the GPU has the case's types: float8 e4m3 came with compute capability 8.9."""
    return capability >= 89 or "*fp8e4nv" not in case.types.values()


def compile_for(case: Case, capability: int, **options: int) -> Resources:
    """Return what the kernel takes once compiled; addresses and row strides are multiples of 16, as in real models.

    Args:
        case: what to compile.
        capability: 90 for sm_90.
        options: of Triton's compiler, in addition to the case's own.
    """
    names = case.kernel.arg_names
    signature, attributes = {}, {}
    for index, name in enumerate(names):
        if name in case.constexprs:
            signature[name] = "constexpr"
            continue
        if name.endswith("_ptr"):
            signature[name] = case.types.get(name) or TYPE_OF.get(name, f"*{case.model_type}")
        else:
            signature[name] = "fp32" if name == "eps" else "i32"
        if name.endswith("_ptr") or "stride" in name or name == "hidden_size":
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(case.kernel, signature, {(names.index(k),): v for k, v in case.constexprs.items()}, attributes)
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
