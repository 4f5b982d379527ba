"""What ranks import in their first checkpointed call, imported before any of them is forked."""

import torch._dynamo  # noqa: F401
