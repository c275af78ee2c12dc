// Which rank raised first, from the store of the default group
// (lowtide/_base/failures.py writes it there).
#pragma once

#include <memory>
#include <string>

#include "comm/borrowed_group.h"

namespace lowtide::comm {

// Where to look from now on, and under which key: "<rank> <what it said>".
void find_first_failure_in(std::shared_ptr<BorrowedGroup> default_group,
                           std::string key);

// "rank 1 raised first: '...'", or nothing: nobody else has raised as far as is
// known.  On any thread, with the GIL or without.
std::string first_failure();
// The same over a connection of its own, so that no thread that waits for the
// store is waited for.  Never takes the GIL: stores in Python are not asked.
std::string first_failure_aside();

}  // namespace lowtide::comm
