// One forward of a unit whose modules were sharded together: it begins with the
// first module that runs and is over when all have run.
//
// What a forward leaves behind when modules are missing, called again or raise
// must not reach the next one: `end` closes it, whoever notices that nothing of
// it can follow (the root's forward returned, or the step was aborted).
#pragma once

#include <cstddef>
#include <vector>

namespace lowtide::shard {

class GroupForward {
 public:
  // One module: every call of it is a forward.
  explicit GroupForward(std::size_t modules = 1) : modules_(modules) {}

  // A module is entered.  `alone`: no forward of a module around the unit is
  // under way, so that a call of one module is a forward by itself.  Whether
  // the unit's forward begins with it, also because one before did not return.
  bool begins_with(std::size_t module, bool alone) const;
  void enter(std::size_t module, bool begins);
  // It returns: whether the unit's forward is over.
  bool leave(std::size_t module, bool alone);

  // Some of several modules have run, and more may.
  bool under_way() const { return modules_.size() > 1 && under_way_; }
  void end();

  // Of the module's last call, for its recomputation.
  bool began_with(std::size_t module) const { return modules_[module].began; }
  bool ended_with(std::size_t module) const { return modules_[module].ended; }

 private:
  struct Module {
    bool ran = false;     // in this forward
    bool inside = false;  // entered, and has not returned
    bool began = true;
    bool ended = true;
  };

  bool nobody_inside() const;

  std::vector<Module> modules_;
  bool under_way_ = false;
};

}  // namespace lowtide::shard
