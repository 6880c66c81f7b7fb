"""The Qwen-VL caption engine: transformers' own model modules behind our preprocessing, batching and sampling."""
