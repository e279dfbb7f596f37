"""Make large language models small, fast and measured: quantize, run, measure."""

__version__ = "0.1.0"
