"""Points run by joblib's workers: those that are stored are not run again, and one that fails does not stop the rest.

It must not know what the points are for.
"""

from __future__ import annotations

import itertools
import signal
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Any

import joblib

from flowsim.names import unknown
from flowsim.study.points import Point, Record, run_point
from flowsim.study.store import Store

__all__ = ["BACKENDS", "Progress", "Workers"]

BACKENDS = ("loky", "dask", "ray")
ROUND = 8  # runs a worker of Ray is given before any is kept
Progress = Callable[[int, int], None]
"""Called with the points that are done, and about how many there will be."""


class Workers:
    """Workers, and the store of what they have finished; a context manager that ends them.

    Args:
        jobs: processes; -1 for one a core, 1 for none beside this one.
        backend: `loky` for this machine; `dask` or `ray` for the cluster that their own settings name
            (`DASK_SCHEDULER_ADDRESS`, `RAY_ADDRESS`, or a client made before), else one on this machine.
        folder: where finished points are kept; None for nowhere.
        progress: told after each point.

    Raises:
        ValueError: an unknown backend or one whose library is not installed, or no jobs.
        OSError: a folder that cannot be written.
    """

    def __init__(
        self,
        *,
        jobs: int = -1,
        backend: str = "loky",
        folder: str | Path | None = None,
        progress: Progress | None = None,
    ) -> None:
        if backend not in BACKENDS:
            raise ValueError(unknown("backend", backend, BACKENDS))
        if not isinstance(jobs, int) or jobs == 0:
            raise ValueError(f"jobs is {jobs!r}; it must be a whole number of processes, or -1 for one a core")
        self.jobs, self.backend = jobs, backend
        self.store = Store(folder)
        self._progress = progress
        self._done = 0
        self._close: Callable[[], None] = _nothing

    def __enter__(self) -> Workers:
        if self.backend == "dask":
            self._close = _start_dask()
        elif self.backend == "ray":
            self._close = _start_ray()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.backend == "loky" and self.jobs != 1:  # the next study's workers import modules as they are then
            from joblib.externals.loky import get_reusable_executor

            get_reusable_executor().shutdown(wait=kind is None, kill_workers=kind is not None)
        self._close()

    def run(self, points: Sequence[Point], about: Sequence[Mapping[str, Any]], coming: int = 0) -> list[Record]:
        """A record of each point, in their order.

        Args:
            points: those that are stored are answered from there.
            about: what the store's file says of each.
            coming: about how many points will follow after these, for the progress.

        Raises:
            OSError: the store cannot be written. What was finished before is kept.
        """
        keys = {point.place: point.key for point in points}
        notes = {point.place: note for point, note in zip(points, about, strict=True)}
        records: dict[int, Record] = {}
        first: dict[str, Point] = {}  # two points alike are run once
        for point in points:
            figures = self.store.get(keys[point.place])
            if figures is not None:
                records[point.place] = Record(point.place, figures, None, 0.0)
                self._tell(len(points) - len(records) + coming)
            else:
                first.setdefault(keys[point.place], point)
        for record in self._each(list(first.values())):
            if record.figures is not None:
                self.store.add(keys[record.place], record.figures, notes[record.place])
            records[record.place] = record
            self._tell(len(points) - len(records) + coming)
        for point in points:
            twin = records[first[keys[point.place]].place] if keys[point.place] in first else records[point.place]
            records[point.place] = Record(point.place, twin.figures, twin.error, twin.wall_s)
        return [records[point.place] for point in points]

    def _tell(self, left: int) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, self._done + left)

    def _each(self, points: list[Point]) -> Iterator[Record]:
        """Records as they come. Where a worker dies, each point that it may have died of runs on its own."""
        left = {point.place: point for point in points}
        while left:
            handed_out: list[Point] = []
            try:
                with closing(self._parallel(_noted(list(left.values()), handed_out))) as records:
                    for record in records:
                        del left[record.place]
                        yield record
            except (OSError, GeneratorExit):
                raise
            except Exception as error:
                suspects = [point for point in handed_out if point.place in left]
                if not suspects:
                    raise
                for point in suspects:
                    del left[point.place]
                    yield self._alone(point, error)

    def _alone(self, point: Point, broken: Exception) -> Record:
        try:
            (record,) = list(self._parallel(iter([point])))
        except Exception as error:
            text = str(error).split("\n")[0] or str(broken).split("\n")[0]
            return Record(point.place, None, f"its worker died: {type(error).__name__}: {text}", 0.0)
        return record

    def _parallel(self, points: Iterator[Point]) -> Generator[Record, None, None]:
        """Hands out points, several at once where they are short; joblib says nothing of those that are cut short."""
        runs = (joblib.delayed(run_point)(point) for point in points)
        own = {"initializer": _heed_no_interrupt} if self.backend == "loky" else {}
        with joblib.parallel_config(backend=self.backend, n_jobs=self.jobs, **own):  # Dask's takes no other way
            if self.backend == "ray":  # it answers only when all that it was given is done
                records = _rounds(joblib.Parallel(), runs, ROUND * joblib.effective_n_jobs(self.jobs))
            else:
                records = joblib.Parallel(return_as="generator_unordered")(runs)
        try:
            yield from records
        finally:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                records.close()


def _heed_no_interrupt() -> None:
    """Ctrl-C reaches the workers too: it is for the study, which ends them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _rounds(parallel: Any, runs: Iterator[Any], size: int) -> Generator[Record, None, None]:
    """Records of so many runs after the other."""
    while some := list(itertools.islice(runs, size)):
        yield from parallel(some)


def _noted(points: list[Point], handed_out: list[Point]) -> Iterator[Point]:
    """Hands out points, and notes which."""
    for point in points:
        handed_out.append(point)
        yield point


def _start_dask() -> Callable[[], None]:
    try:
        from distributed import Client, get_client
    except ImportError as error:
        raise ValueError("backend=dask needs the extra `dask`: pip install 'flowsim-prefill[dask]'") from error
    try:
        get_client()
    except ValueError:  # no client yet
        close: Callable[[], None] = Client().close
        return close
    return _nothing


def _nothing() -> None:
    """What was there before a study stays."""


def _start_ray() -> Callable[[], None]:
    try:
        import ray
        from ray.util.joblib import register_ray
    except ImportError as error:
        raise ValueError("backend=ray needs the extra `ray`: pip install 'flowsim-prefill[ray]'") from error
    register_ray()
    if ray.is_initialized():
        return _nothing
    ray.init(log_to_driver=False)
    close: Callable[[], None] = ray.shutdown
    return close
