"""Captions of images by a vision-language model: what each rank of a captioning job does."""
