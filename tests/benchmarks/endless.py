"""A program that takes any arguments and does not end by itself."""

import time

if __name__ == "__main__":
    time.sleep(3600)
