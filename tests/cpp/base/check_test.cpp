#include "base/check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace lowtide::base {
namespace LOWTIDE_FILE {

using testing::AllOf;
using testing::HasSubstr;

TEST(CheckTest, ErrorTextHasFourParts) {
  EXPECT_EQ(error_text("layers.0.weight", "a 2-D shape", on_rank("[3]", 1, 4),
                       "Reshape it."),
            "lowtide: layers.0.weight: expected a 2-D shape, got [3] (rank 1 "
            "of 4). Reshape it.");
}

TEST(CheckTest, InvariantNamesTheConditionAndAsksForAReport) {
  EXPECT_NO_THROW(LOWTIDE_INVARIANT(1 + 1 == 2, "arithmetic"));
  try {
    LOWTIDE_INVARIANT(1 + 1 == 3, "arithmetic");
    FAIL() << "a broken invariant must throw";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("arithmetic (1 + 1 == 3"),
                                    HasSubstr("python -m lowtide env")));
  }
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::base
