#include "comm/borrowed_group.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "base/check.h"

namespace lowtide::comm {
namespace LOWTIDE_FILE {

class WatchedGroup final : public c10d::ProcessGroup {
 public:
  explicit WatchedGroup(bool& alive) : ProcessGroup(1, 4), alive_(alive) {
    alive_ = true;
  }
  ~WatchedGroup() override { alive_ = false; }

 private:
  bool& alive_;
};

class BorrowedGroupTest : public testing::Test {
 protected:
  BorrowedGroupTest() {
    auto group = c10::make_intrusive<WatchedGroup>(alive_);
    c10d::register_process_group("borrowed", group);
    borrowed_.emplace(std::move(group), "borrowed");
  }
  ~BorrowedGroupTest() override { c10d::unregister_all_process_groups(); }

  bool alive_ = false;
  std::optional<BorrowedGroup> borrowed_;
};

TEST_F(BorrowedGroupTest, LivesWhileTorchHasIt) {
  BorrowedGroup::give_back_ended();
  EXPECT_TRUE(alive_);
  EXPECT_EQ(c10d::resolve_process_group("borrowed"), borrowed_->get());
}

TEST_F(BorrowedGroupTest, EndsWithTorchs) {
  c10d::unregister_process_group("borrowed");
  EXPECT_TRUE(alive_);
  BorrowedGroup::give_back_ended();
  EXPECT_FALSE(alive_);
  BorrowedGroup::give_back_ended();
  EXPECT_EQ(borrowed_->rank(), 1);
  EXPECT_EQ(borrowed_->size(), 4);
  EXPECT_THAT([&] { borrowed_->get(); },
              testing::ThrowsMessage<Error>(testing::HasSubstr(
                  "got none: it was destroyed (rank 1 of 4)")));
}

TEST_F(BorrowedGroupTest, AnotherOfItsNameIsNotIt) {
  c10d::unregister_process_group("borrowed");
  bool other = false;
  c10d::register_process_group("borrowed",
                               c10::make_intrusive<WatchedGroup>(other));
  BorrowedGroup::give_back_ended();
  EXPECT_FALSE(alive_);
}

TEST_F(BorrowedGroupTest, ACallKeepsItUntilItReturns) {
  c10d::unregister_process_group("borrowed");
  auto in_use = borrowed_->get();
  BorrowedGroup::give_back_ended();
  EXPECT_TRUE(alive_);
  in_use.reset();
  EXPECT_FALSE(alive_);
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::comm
