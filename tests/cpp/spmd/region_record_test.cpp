// Nodes and calls are told to LiveRegions as comm/call_observer.h would.
#include "spmd/region_record.h"

#include <ATen/ATen.h>
#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "spmd/live_regions.h"

namespace lowtide::spmd {
namespace LOWTIDE_FILE {

using comm::Kind;
using testing::IsEmpty;

class RegionRecordTest : public testing::Test {
 protected:
  // An operator with one node; returns the node's number.
  static std::uint64_t op(RegionRecord& record, const std::string& name,
                          std::optional<Kind> need = std::nullopt) {
    record.begin_operator(name, name + ".py:1");
    if (need) record.require(*need, "tp");
    const std::uint64_t node = at::sequence_number::get_and_increment();
    EXPECT_THAT(record.end_operator(), IsEmpty());
    return node;
  }

  static void runs(std::uint64_t node) {
    live_regions().node(at::RecordFunction::currentThreadId(), node);
  }

  static void sends(std::uint64_t node, Kind kind,
                    const std::string& issuer = "") {
    comm::ObservedCall call;
    call.kind = comm::kind_name(kind);
    call.group = "tp";
    call.value = "float32[4]";
    call.bytes = 16;
    call.issuer = issuer;
    call.in_backward = true;
    call.node_thread = at::RecordFunction::currentThreadId();
    call.node_sequence = node;
    call.node_name = "Node";
    live_regions().collective(call);
  }
};

TEST_F(RegionRecordTest, WhatIsRequiredAndSentIsSettled) {
  RegionRecord record;
  record.open();
  const auto node = op(record, "spmd.convert", Kind::all_reduce);
  EXPECT_THAT(record.close(), IsEmpty());
  runs(node);
  sends(node, Kind::all_reduce);
  EXPECT_THAT(record.settle(), IsEmpty());
  EXPECT_EQ(record.sent().at("all-reduce").bytes, 16);
  // The next backward is settled on its own.
  runs(node);
  const auto findings = record.settle();
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_TRUE(findings[0].missing);
  EXPECT_EQ(findings[0].op, "spmd.convert");
}

TEST_F(RegionRecordTest, WhatDidNotRunIsNotMissing) {
  RegionRecord record;
  record.open();
  op(record, "spmd.convert", Kind::all_reduce);
  record.close();
  EXPECT_THAT(record.settle(), IsEmpty());
}

TEST_F(RegionRecordTest, AnotherKindOrASecondCallIsUnexpected) {
  RegionRecord record;
  record.open();
  const auto node = op(record, "my::op", Kind::all_reduce);
  record.close();
  runs(node);
  sends(node, Kind::all_gather);
  sends(node, Kind::all_reduce);
  sends(node, Kind::all_reduce);
  const auto findings = record.settle();
  ASSERT_EQ(findings.size(), 2u);
  for (const Finding& each : findings) {
    EXPECT_FALSE(each.missing);
    EXPECT_EQ(each.op, "my::op");
    EXPECT_EQ(each.where, "my::op.py:1");
    EXPECT_EQ(each.value, "float32[4]");
  }
  EXPECT_EQ(findings[0].kind, "all-gather");
  EXPECT_EQ(findings[1].kind, "all-reduce");
}

TEST_F(RegionRecordTest, AnOperatorDoesNotMeetAnothersNeed) {
  RegionRecord record;
  record.open();
  const auto needs = op(record, "needs", Kind::all_reduce);
  const auto sent = op(record, "sends");
  record.close();
  runs(needs);
  runs(sent);
  sends(sent, Kind::all_reduce);
  EXPECT_EQ(record.settle().size(), 2u);
}

TEST_F(RegionRecordTest, ANeedWithoutAnOperatorIsMetByAny) {
  RegionRecord record;
  record.open();
  const auto node = op(record, "opaque");
  record.close();
  record.require_anywhere(Kind::all_reduce, "tp", "the gradient of 'x'");
  sends(node, Kind::all_reduce);
  EXPECT_THAT(record.settle(), IsEmpty());
  record.require_anywhere(Kind::all_reduce, "tp", "the gradient of 'x'");
  ASSERT_EQ(record.settle().size(), 1u);
}

TEST_F(RegionRecordTest, OtherNodesAndTheEnginesCallsAreNotTheRegions) {
  const auto before = at::sequence_number::get_and_increment();
  RegionRecord record;
  record.open();
  const auto node = op(record, "op");
  record.close();
  const auto after = at::sequence_number::get_and_increment();
  sends(before, Kind::all_reduce);
  sends(after, Kind::all_reduce);
  sends(node, Kind::all_gather, "layers.0");
  EXPECT_THAT(record.settle(), IsEmpty());
  EXPECT_THAT(record.sent(), IsEmpty());
}

TEST_F(RegionRecordTest, TheSmallestRegionOwnsANode) {
  RegionRecord outer, inner;
  outer.open();
  op(outer, "first");
  inner.open();
  const auto node = op(inner, "second");
  inner.close();
  outer.close();
  sends(node, Kind::all_reduce);
  EXPECT_THAT(outer.settle(), IsEmpty());
  EXPECT_EQ(inner.settle().size(), 1u);
}

TEST_F(RegionRecordTest, CallsWhileOpenBelongToTheOperatorThatRuns) {
  RegionRecord record;
  record.open();
  record.begin_operator("talks", "a.py:1");
  sends(0, Kind::all_reduce);
  ASSERT_EQ(record.end_operator().size(), 1u);
  sends(0, Kind::broadcast);
  const auto stray = record.close();
  ASSERT_EQ(stray.size(), 1u);
  EXPECT_EQ(stray[0].kind, "broadcast");
}

TEST_F(RegionRecordTest, PlacesOfNodes) {
  RegionRecord record;
  record.open();
  const auto node = op(record, "op");
  const auto between = at::sequence_number::get_and_increment();
  record.close();
  using Place = std::pair<std::string, std::string>;
  EXPECT_EQ(record.place(node), Place("op", "op.py:1"));
  EXPECT_EQ(record.place(between), Place("", ""));
  EXPECT_EQ(record.place(between + 1), std::nullopt);
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::spmd
