"""Saved weights and state in other forms: Hugging Face folders, torch.distributed.checkpoint, torch.save."""
