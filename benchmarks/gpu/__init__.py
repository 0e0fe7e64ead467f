"""Correctness and speed on a GPU, in calls of at most nine and a half minutes each, without network.

    python -m benchmarks.gpu build --to build/gpu      where there is nvcc: the extension for compute capability 9.0a, to carry along
    python -m benchmarks.gpu first --out FOLDER        every kernel against its reference, tests, kernel times, profiles, networks
    python -m benchmarks.gpu second --out FOLDER       sanitizers, the paper's scale, tables, experiments
    python -m benchmarks.gpu third --out FOLDER        curvlinops' benchmark, paths of launches, Nsight Compute, experiments

``run`` starts processes and limits their time, ``steps`` has the steps of the calls, ``work`` is what the processes run, ``report`` is
printed last. ``run``, ``steps``, ``report`` and ``build`` import no torch, so that no failure of torch ends a call.
"""
