"""`python -m qwen_ray` is `qwen-ray`."""

from qwen_ray.cli import main

if __name__ == "__main__":
    main()
