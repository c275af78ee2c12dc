// A unit's name, shared by its parts: the module's path, known only when the
// root is.  In errors, traces, collectives' labels and the ledger.
#pragma once

#include <memory>
#include <string>

namespace lowtide::shard {

using UnitName = std::shared_ptr<const std::string>;

}  // namespace lowtide::shard
