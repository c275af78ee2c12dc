#include "testing/access_checker.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace lowtide::device {
namespace LOWTIDE_FILE {

using testing::ElementsAre;
using testing::IsEmpty;

// Never dereferenced.
const void* at(std::uintptr_t address) {
  return reinterpret_cast<const void*>(address);
}

class AccessCheckerTest : public testing::Test {
 protected:
  void touch(Stream stream, std::uintptr_t begin, std::size_t bytes,
             Access access, std::string name = "") {
    checker_.touched(stream, at(begin), bytes, access, std::move(name));
  }
  void order(Stream first, Stream second) {
    history_.join(second, history_.clock(first));
  }

  StreamHistory history_;
  AccessChecker checker_{history_};
};

TEST_F(AccessCheckerTest, AUseWaitsForTheAllocation) {
  checker_.allocated(at(0x1000), 256, "gathered of layers.0");
  order(Stream::compute, Stream::gather);
  touch(Stream::gather, 0x1000, 256, Access::write);
  EXPECT_THAT(checker_.violations(), IsEmpty());

  checker_.allocated(at(0x2000), 256, "gathered of layers.1");
  touch(Stream::gather, 0x2000, 256, Access::write, "all-gather");
  EXPECT_THAT(checker_.violations(),
              ElementsAre("write 'all-gather' on gather (entry 3) of "
                          "allocation 2 'gathered of layers.1' does not wait "
                          "for its allocation, allocate on compute (entry 2)"));
}

TEST_F(AccessCheckerTest, AReadWaitsForTheWriteOnAnotherStream) {
  checker_.allocated(at(0x1000), 256, "");
  order(Stream::compute, Stream::gather);
  touch(Stream::gather, 0x1000, 128, Access::write, "cast");
  touch(Stream::compute, 0x1080, 128, Access::read);  // other bytes
  EXPECT_THAT(checker_.violations(), IsEmpty());
  touch(Stream::compute, 0x107f, 1, Access::read);
  EXPECT_THAT(checker_.violations(),
              ElementsAre("read on compute (entry 3) of allocation 1 does not "
                          "wait for the write 'cast' on gather (entry 1)"));
}

TEST_F(AccessCheckerTest, AWriteWaitsForReadsAndWritesOfAllStreams) {
  checker_.allocated(at(0x1000), 256, "");
  for (const Stream stream : {Stream::gather, Stream::reduce, Stream::wire}) {
    order(Stream::compute, stream);
  }
  touch(Stream::gather, 0x1000, 256, Access::read);
  touch(Stream::reduce, 0x1000, 256, Access::read);
  EXPECT_THAT(checker_.violations(), IsEmpty());  // reads do not race
  order(Stream::gather, Stream::wire);
  touch(Stream::wire, 0x1000, 256, Access::write);
  ASSERT_EQ(checker_.violations().size(), 1u);
  order(Stream::reduce, Stream::wire);
  touch(Stream::wire, 0x1000, 256, Access::write);
  EXPECT_EQ(checker_.violations().size(), 1u);
}

TEST_F(AccessCheckerTest, ALaterUseDoesNotHideAnEarlierUnorderedOne) {
  checker_.allocated(at(0x1000), 256, "");
  order(Stream::compute, Stream::gather);
  touch(Stream::gather, 0x1000, 256, Access::write, "first");
  const Clock first = history_.clock(Stream::gather);
  touch(Stream::gather, 0x1000, 16, Access::write, "second");
  // Waits for the first write only: the second one races.
  history_.join(Stream::reduce, first);
  touch(Stream::reduce, 0x1010, 16, Access::read);
  EXPECT_THAT(checker_.violations(), IsEmpty());
  touch(Stream::reduce, 0x1000, 32, Access::read);
  EXPECT_EQ(checker_.violations().size(), 1u);
}

TEST_F(AccessCheckerTest, ALaterReadDoesNotHideTheWriteBeforeIt) {
  checker_.allocated(at(0x1000), 256, "");
  order(Stream::compute, Stream::reduce);
  order(Stream::compute, Stream::gather);
  touch(Stream::gather, 0x1000, 256, Access::write);
  order(Stream::gather, Stream::compute);
  touch(Stream::compute, 0x1000, 256, Access::read);
  EXPECT_THAT(checker_.violations(), IsEmpty());
  touch(Stream::reduce, 0x1000, 256, Access::read);
  EXPECT_EQ(checker_.violations().size(), 1u);
}

TEST_F(AccessCheckerTest, ALaterReadDoesNotHideAnUnorderedOne) {
  checker_.allocated(at(0x1000), 256, "");
  for (const Stream stream : {Stream::gather, Stream::reduce}) {
    order(Stream::compute, stream);
    touch(stream, 0x1000, 256, Access::read);
  }
  order(Stream::reduce, Stream::compute);  // not after the gather stream's
  touch(Stream::compute, 0x1000, 256, Access::write);
  EXPECT_EQ(checker_.violations().size(), 1u);
}

TEST_F(AccessCheckerTest, AReleaseWaitsForEveryUse) {
  for (const bool waits : {true, false}) {
    checker_.allocated(at(0x1000), 256, "gradient_stream of layers.0");
    order(Stream::compute, Stream::reduce);
    touch(Stream::reduce, 0x1000, 64, Access::read, "reduce-scatter");
    if (waits) order(Stream::reduce, Stream::compute);
    EXPECT_EQ(checker_.released(at(0x1000)), 256u);
    if (waits) {
      EXPECT_THAT(checker_.violations(), IsEmpty());
    }
  }
  EXPECT_THAT(
      checker_.violations(),
      ElementsAre("release on compute (entry 5) of allocation 2 "
                  "'gradient_stream of layers.0': compute does not wait for "
                  "the read 'reduce-scatter' on reduce (entry 4)"));
}

TEST_F(AccessCheckerTest, NothingUsesReleasedBytes) {
  checker_.allocated(at(0x1000), 256, "");
  checker_.released(at(0x1000));
  touch(Stream::compute, 0x1010, 8, Access::read);
  EXPECT_THAT(checker_.violations(),
              ElementsAre("read on compute (entry 2) of allocation 1 after "
                          "its release, release on compute (entry 1)"));
  EXPECT_EQ(checker_.released(at(0x1000)), 0u);  // only once
}

TEST_F(AccessCheckerTest, AReusedAddressIsANewAllocation) {
  checker_.allocated(at(0x1000), 256, "");
  checker_.released(at(0x1000));
  checker_.allocated(at(0x1080), 256, "");  // overlaps the released one
  touch(Stream::compute, 0x1080, 256, Access::write);
  EXPECT_THAT(checker_.violations(), IsEmpty());
  // What is left of the old region is nobody's.
  touch(Stream::compute, 0x1000, 8, Access::read);
  EXPECT_THAT(checker_.violations(),
              ElementsAre("read on compute (entry 4) of 8 bytes that nobody "
                          "allocated"));
}

TEST_F(AccessCheckerTest, AUseStaysInsideItsAllocation) {
  checker_.allocated(at(0x1000), 256, "");
  touch(Stream::compute, 0x10f8, 8, Access::read);
  touch(Stream::compute, 0x1100, 0, Access::read);  // nothing
  EXPECT_THAT(checker_.violations(), IsEmpty());
  touch(Stream::compute, 0x10f8, 16, Access::write);
  EXPECT_THAT(checker_.violations(),
              ElementsAre("write on compute (entry 2) of 16 bytes goes 8 bytes "
                          "past the end of allocation 1"));
}

TEST_F(AccessCheckerTest, DescribeNamesALiveAllocation) {
  checker_.allocated(at(0x1000), 256, "");
  checker_.describe(at(0x1000), "gathered of head");
  checker_.released(at(0x1000));
  touch(Stream::compute, 0x1000, 1, Access::read);
  EXPECT_THAT(
      checker_.violations(),
      ElementsAre(testing::HasSubstr("allocation 1 'gathered of head'")));
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::device
