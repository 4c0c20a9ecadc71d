"""Early-exiting speculative decoding (EESD, arXiv 2406.03853) as a vLLM plugin.

Importing this package is cheap, since vLLM loads plugins in every process: the public names are imported on first use.
"""

__version__ = "0.1.0"

__all__ = ["EESDConfig", "__version__"]


def __getattr__(name):
    if name == "EESDConfig":
        from vllm_eesd.config import EESDConfig

        return EESDConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted(__all__)
