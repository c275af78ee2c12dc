#include "testing/stream_history.h"

#include <gtest/gtest.h>

namespace lowtide::device {
namespace LOWTIDE_FILE {

constexpr auto kMark = Entry::Kind::mark;

TEST(StreamHistoryTest, AStreamIsInOrder) {
  StreamHistory history;
  const EntryId a = history.append(Stream::compute, kMark, "a");
  const EntryId b = history.append(Stream::compute, kMark, "b");
  EXPECT_TRUE(history.happens_before(a, b));
  EXPECT_FALSE(history.happens_before(b, a));
  EXPECT_FALSE(history.happens_before(a, a));
}

TEST(StreamHistoryTest, StreamsAreUnorderedUntilOneWaits) {
  StreamHistory history;
  const EntryId a = history.append(Stream::compute, kMark, "a");
  const Clock recorded = history.clock(Stream::compute);
  const EntryId late = history.append(Stream::compute, kMark, "late");
  const EntryId b = history.append(Stream::gather, kMark, "b");
  EXPECT_FALSE(history.happens_before(a, b));
  history.join(Stream::gather, recorded);
  const EntryId c = history.append(Stream::gather, kMark, "c");
  EXPECT_TRUE(history.happens_before(a, c));
  EXPECT_FALSE(history.happens_before(late, c));
  EXPECT_FALSE(history.happens_before(a, b));
}

TEST(StreamHistoryTest, OrderIsTransitiveOverStreams) {
  StreamHistory history;
  const EntryId a = history.append(Stream::compute, kMark, "a");
  history.join(Stream::gather, history.clock(Stream::compute));
  history.append(Stream::gather, kMark, "b");
  history.join(Stream::wire, history.clock(Stream::gather));
  const EntryId c = history.append(Stream::wire, kMark, "c");
  EXPECT_TRUE(history.happens_before(a, c));
}

TEST(StreamHistoryTest, TheHostOrdersAllStreamsBehindOne) {
  StreamHistory history;
  const EntryId a = history.append(Stream::reduce, kMark, "a");
  const EntryId before = history.append(Stream::compute, kMark, "before");
  history.join_host(Stream::reduce);
  const EntryId after = history.append(Stream::compute, kMark, "after");
  EXPECT_FALSE(history.happens_before(a, before));
  EXPECT_TRUE(history.happens_before(a, after));
}

TEST(StreamHistoryTest, StreamsAndKindsHaveNames) {
  EXPECT_EQ(stream_name(Stream::compute), "compute");
  EXPECT_EQ(stream_name(Stream::gather), "gather");
  EXPECT_EQ(stream_name(Stream::reduce), "reduce");
  EXPECT_EQ(stream_name(Stream::wire), "wire");
  EXPECT_EQ(stream_name(Stream::offload), "offload");
  EXPECT_EQ(stream_name(Stream::reload), "reload");
  EXPECT_EQ(entry_kind_name(Entry::Kind::mark), "mark");
  EXPECT_EQ(entry_kind_name(Entry::Kind::allocate), "allocate");
  EXPECT_EQ(entry_kind_name(Entry::Kind::release), "release");
  EXPECT_EQ(entry_kind_name(Entry::Kind::read), "read");
  EXPECT_EQ(entry_kind_name(Entry::Kind::write), "write");
  EXPECT_EQ(entry_kind_name(Entry::Kind::record), "record");
  EXPECT_EQ(entry_kind_name(Entry::Kind::wait), "wait");
  EXPECT_EQ(entry_kind_name(Entry::Kind::synchronize), "synchronize");
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::device
