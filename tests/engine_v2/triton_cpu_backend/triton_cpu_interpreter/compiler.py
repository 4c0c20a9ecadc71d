"""The compiler Triton wants of a backend; the interpreter never calls it."""

from triton.backends.compiler import BaseBackend


class InterpreterBackend(BaseBackend):
    """Compiles nothing."""

    @staticmethod
    def supports_target(target):
        return target.backend == "cpu"

    def hash(self):
        return "interpreter"

    def parse_options(self, options):
        return options

    def add_stages(self, stages, options, language):
        raise NotImplementedError("interpreted kernels are not compiled")

    def load_dialects(self, context):
        pass

    def get_module_map(self):
        return {}
