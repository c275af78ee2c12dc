"""verl, unedited: a process that imports this module, Ray's workers too, shards with
lowtide from then on, and says at its end what its models held, on rank 0.

verl imports it by name: what `VERL_USE_EXTERNAL_MODULES` names with verl itself, what
`model.external_lib` names where a worker reads the model's configuration, which is
before it builds the model."""

from __future__ import annotations

import atexit

from lowtide.integrations import session, spawned
from lowtide.integrations.binding import is_bound

if not is_bound():  # as under `lowtide run`
    _options = session.Options()
    atexit.register(session.Session(_options).report)
    spawned.bind_in_children(session.enter, _options)
