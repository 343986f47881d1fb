"""Other systems to compare with, each installed in an environment of its own and served on given cores.

    install   vLLM's CPU build and NIXL from PyPI into an environment folder
    vllm      that build, colocated or as a prefill and a decode server joined by NIXL, for as long as it is measured
    proxy     what stands before the two: they serve a prompt only after one another

``PEERS`` names the environment folder that commands of the bench look for.
"""
