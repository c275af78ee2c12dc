#include "base/exception_text.h"

#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <new>
#include <stdexcept>

namespace lowtide::base {
namespace LOWTIDE_FILE {

class Silent : public std::exception {
 public:
  const char* what() const noexcept override { return ""; }
};

TEST(ExceptionTextTest, AllLinesAreOne) {
  EXPECT_EQ(exception_text(std::runtime_error("NCCL failed\n\n  Last error: "
                                              "rank 3 is gone\n")),
            "NCCL failed Last error: rank 3 is gone");
}

TEST(ExceptionTextTest, TorchsBacktraceIsLeftOut) {
  try {
    TORCH_CHECK(false, "one is not two");
  } catch (const c10::Error& error) {
    EXPECT_EQ(exception_text(error), "one is not two");
  }
}

TEST(ExceptionTextTest, OneWithoutATextHasItsType) {
  EXPECT_THAT(exception_text(Silent()),
              testing::MatchesRegex("lowtide::base::.*::Silent"));
  EXPECT_EQ(exception_text(std::bad_alloc()), "std::bad_alloc");
}

TEST(ExceptionTextTest, OthersKnowTypesThatWeDoNot) {
  use_exception_text([](const std::exception& error) {
    return dynamic_cast<const Silent*>(&error) != nullptr
               ? std::optional<std::string>("ValueError: no")
               : std::nullopt;
  });
  EXPECT_EQ(exception_text(Silent()), "ValueError: no");
  EXPECT_EQ(exception_text(std::runtime_error("yes")), "yes");
  use_exception_text(nullptr);
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::base
