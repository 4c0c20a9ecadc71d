"""What the plugin does to a process that is not its own: on a platform that is not here, and to plain vLLM."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_eesd.host import plugin
from vllm_eesd.host.vllm_source import installed_source

HERE = Path(__file__).parent
TIMEOUT_S = 600
#: Modules that importing the plugin and registering it may add to a process of plain vLLM.
MOST_MODULES = 60
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
}


def run(*command, **environment):
    """Return the JSON object that a fresh Python process prints last."""
    done = subprocess.run(
        [sys.executable, *command], env=os.environ | environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_nothing_of_torch_or_vllm_is_replaced_on_another_platform(tmp_path):
    """vLLM's CPU worker replaces streams, events and more by stubs when it is imported, on whatever platform."""
    pytest.importorskip("triton")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    backend = str(HERE.parent / "engine_v2" / "triton_cpu_backend")
    report = run(str(HERE / "other_platform.py"), str(tmp_path), PYTHONPATH=backend, OMP_NUM_THREADS="1")
    assert report.pop("triton")
    assert list(report) == ["register", "import_engine", "doctor", "config", "worker_seams"]
    assert report == {stage: {"error": "", "replaced": [], "modules": []} for stage in report}


def test_only_seams_of_the_cpu_name_a_module_that_replaces_torch():
    naming = [
        seam
        for records in plugin.PLACES.values()
        for seam in records
        if "vllm.v1.worker.cpu." in installed_source(seam.module)
    ]
    assert naming and {seam.platform for seam in naming} == {"cpu"}


PLAIN = """
import json, sys
import vllm.engine.arg_utils
before = set(sys.modules)
from vllm_eesd.host import plugin
plugin.register()
added = sorted(set(sys.modules) - before)
import vllm.v1.engine.input_processor, vllm.v1.executor.multiproc_executor, vllm.v1.worker.gpu_worker
print(json.dumps([added, sorted(sys.modules)]))
"""


def test_a_process_of_plain_vllm_gets_next_to_nothing():
    added, everything = run("-c", PLAIN)
    assert 0 < len(added) < MOST_MODULES
    assert [name for name in added if not name.startswith("vllm_eesd")] == []
    heavy = {"numba", "llvmlite", "vllm_eesd.policy", "vllm_eesd.round", "vllm_eesd.kernels"}
    heavy |= {"vllm_eesd.host.v1.proposer", "vllm_eesd.host.v2.speculator"}
    assert [name for name in everything if name in heavy] == []
    assert not [name for name in added if name.startswith("vllm.")]
    assert "vllm.v1.worker.cpu_worker" not in everything


FRONT_END = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
from vllm.config import ModelConfig, ParallelConfig
from vllm_eesd.host import plugin
plugin.register()
target = ModelConfig(model=sys.argv[1], skip_tokenizer_init=True, dtype="float32", enforce_eager=True)
args = EngineArgs(model=sys.argv[1], speculative_config={"method": "eesd", "exit_layer": 2})
config = args.create_speculative_config(target, ParallelConfig())
from vllm_eesd.request_options import RequestOptions
RequestOptions.parse({"eesd_max_draft_tokens": 2})
print(json.dumps([type(config).__name__, sorted(sys.modules)]))
"""


def test_a_front_end_that_asks_for_eesd_compiles_no_policy(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    name, modules = run("-c", FRONT_END, str(tmp_path))
    assert name == "EESDSpeculativeConfig"
    assert [m for m in modules if m in ("numba", "vllm_eesd.policy", "vllm.v1.worker.cpu_worker")] == []
