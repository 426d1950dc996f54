"""Export to and import from Hugging Face transformers.

`import nsa.hf` registers the classes with transformers: `AutoModelForCausalLM.from_pretrained(FOLDER)` then loads an
export of `nsa export`. Without transformers (the extra `hf`) only `nsa.hf.importer` works.
"""

from importlib.util import find_spec

if find_spec("transformers") is not None:
    from transformers import AutoConfig, AutoModelForCausalLM

    from nsa.hf.modeling import NSACache, NSAForCausalLM, NSALMConfig

    AutoConfig.register(NSALMConfig.model_type, NSALMConfig, exist_ok=True)
    AutoModelForCausalLM.register(NSALMConfig, NSAForCausalLM, exist_ok=True)

    __all__ = ["NSACache", "NSAForCausalLM", "NSALMConfig"]
