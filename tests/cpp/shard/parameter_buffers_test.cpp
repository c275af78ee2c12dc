#include "shard/parameters/parameter_buffers.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "buffers_fixture.h"

namespace lowtide::shard {
namespace LOWTIDE_FILE {

using comm::RecordingCollectives;
using memory::Category;
using testing::Each;
using testing::IsEmpty;

constexpr auto kUnit = "layers.0";

// Mixed dtypes, uneven rows, fewer rows than ranks, no elements.
std::vector<ParameterInfo> mixed_infos() {
  const auto info = [](std::string name, std::vector<std::int64_t> sizes,
                       at::ScalarType storage, at::ScalarType compute) {
    return ParameterInfo{std::move(name), std::move(sizes), storage, compute,
                         at::kFloat};
  };
  return {
      info("even", {6, 4}, at::kFloat, at::kBFloat16),
      info("uneven", {5, 3}, at::kFloat, at::kBFloat16),
      info("kept", {7}, at::kFloat, at::kFloat),
      info("one_row", {1, 130}, at::kFloat, at::kBFloat16),
      info("empty_rows", {0, 3}, at::kFloat, at::kBFloat16),
      info("empty_columns", {4, 0}, at::kFloat, at::kFloat),
      info("counter", {3, 2, 2}, at::kLong, at::kLong),
      info("half", {2, 2}, at::kBFloat16, at::kBFloat16),
  };
}

std::vector<ParameterInfo> uniform_infos() {
  return {{"w", {4, 4}, at::kFloat, at::kFloat, at::kFloat}};
}

at::Tensor values_for(const ParameterInfo& info, std::int64_t seed) {
  at::Tensor values = at::empty(info.sizes, info.storage_dtype);
  for (std::int64_t k = 0; k < values.numel(); ++k) {
    values.view({-1})[k] = static_cast<double>((k * 7 + seed * 13) % 101) - 50;
  }
  return values;
}

// One rank's piece of one parameter in the compute dtype, padded with zeros.
at::Tensor padded_piece(const ParameterInfo& info, const at::Tensor& full,
                        std::int64_t rank, std::int64_t size) {
  const std::int64_t rows = (info.sizes[0] + size - 1) / size;
  auto sizes = info.sizes;
  sizes[0] = rows;
  at::Tensor piece = at::zeros(sizes, info.compute_dtype);
  const std::int64_t first = std::min(rank * rows, info.sizes[0]);
  const std::int64_t count = std::min(rows, info.sizes[0] - first);
  piece.narrow(0, 0, count).copy_(full.narrow(0, first, count));
  return piece.view({-1}).view(at::kByte);
}

class ParameterBuffersTest : public BuffersFixture {
 protected:
  // Loads values that depend on the parameter; peers hold the other rows.
  void make(std::vector<ParameterInfo> infos, std::int64_t rank,
            std::int64_t size) {
    infos_ = std::move(infos);
    buffers_.emplace(std::make_shared<const std::string>(kUnit), infos_, size,
                     rank, memory_);
    full_.clear();
    for (std::size_t i = 0; i < infos_.size(); ++i) {
      full_.push_back(values_for(infos_[i], static_cast<std::int64_t>(i)));
      buffers_->load_full(i, full_[i]);
    }
    collectives_.emplace(
        rank, size, runtime_,
        [this, size](const RecordingCollectives::Request& request,
                     const at::Tensor& mine) {
          // Parameters without elements are not in the list, packed ones
          // share its last entry.
          std::size_t seen = 0;
          at::Tensor row = at::zeros_like(mine);
          for (std::size_t i = 0; i < infos_.size(); ++i) {
            if (full_[i].numel() == 0) continue;
            const auto piece =
                padded_piece(infos_[i], full_[i], request.rank, size);
            if (buffers_->slice(i).packed) {
              const auto at = buffers_->slice(i).input_offset;
              if (at + piece.numel() <= row.numel()) {
                row.narrow(0, at, piece.numel()).copy_(piece);
              }
            } else if (seen++ == request.index) {
              return piece;
            }
          }
          return row;
        });
  }

  void expect_sharded() const {
    EXPECT_EQ(live(Category::gathered), 0);
    EXPECT_EQ(live(Category::gather_input), 0);
    for (std::size_t i = 0; i < buffers_->size(); ++i) {
      EXPECT_EQ(data_or_null(buffers_->full(i).storage()), nullptr);
      EXPECT_EQ(buffers_->storage(i).data(), nullptr);
    }
  }

  std::vector<ParameterInfo> infos_;
  std::vector<at::Tensor> full_;
};

TEST_F(ParameterBuffersTest, TheFullParameterIsAllRanksRowsOneAfterAnother) {
  for (std::int64_t size = 1; size <= 5; ++size) {
    for (std::int64_t rank = 0; rank < size; ++rank) {
      make(mixed_infos(), rank, size);
      gather_and_arrive();
      for (std::size_t i = 0; i < infos_.size(); ++i) {
        SCOPED_TRACE(infos_[i].name);
        EXPECT_EQ(buffers_->full(i).scalar_type(), infos_[i].compute_dtype);
        EXPECT_EQ(buffers_->full(i).sizes(), infos_[i].sizes);
        EXPECT_TRUE(buffers_->full(i).is_contiguous());
        EXPECT_TRUE(
            buffers_->full(i).equal(full_[i].to(infos_[i].compute_dtype)));
      }
      buffers_->release();
      expect_sharded();
    }
  }
  EXPECT_THAT(runtime_->violations(), IsEmpty());
}

TEST_F(ParameterBuffersTest, PaddingIsZeroOnTheWire) {
  make(mixed_infos(), 0, 4);
  gather_and_arrive();
  // "uneven": 5 rows of 3 over 4 ranks of 2 rows; 9 elements of padding.
  const auto* base = static_cast<const char*>(buffers_->storage(1).data());
  EXPECT_THAT(std::vector<char>(base + 15 * 2, base + 24 * 2), Each(0));
}

TEST_F(ParameterBuffersTest, ShardsLieInOneMasterEachOnItsOwnStorage) {
  make(mixed_infos(), 1, 2);
  const at::Tensor shard = buffers_->local_shard(1);
  EXPECT_EQ(shard.sizes(), (std::vector<std::int64_t>{2, 3}));
  EXPECT_TRUE(shard.equal(full_[1].narrow(0, 3, 2)));
  const at::Tensor first = buffers_->local_shard(0);
  EXPECT_EQ(shard.storage_offset(), 0);
  EXPECT_EQ(first.storage_offset(), 0);
  const auto distance = static_cast<const char*>(shard.const_data_ptr()) -
                        static_cast<const char*>(first.const_data_ptr());
  EXPECT_EQ(distance,
            buffers_->slice(1).shard_offset - buffers_->slice(0).shard_offset);
  EXPECT_EQ(static_cast<std::int64_t>(shard.storage().nbytes()),
            buffers_->slice(1).shard_bytes);
  // What an optimizer writes there is gathered next.
  shard.add_(1);
  full_[1].narrow(0, 3, 2).add_(1);
  gather_and_arrive();
  EXPECT_TRUE(buffers_->full(1).equal(full_[1].to(at::kBFloat16)));
}

TEST_F(ParameterBuffersTest, ARankWithoutRowsHasEmptyShards) {
  make(mixed_infos(), 3, 4);
  EXPECT_EQ(buffers_->local_shard(3).sizes(),
            (std::vector<std::int64_t>{0, 130}));
  EXPECT_EQ(buffers_->local_shard(5).sizes(),
            (std::vector<std::int64_t>{1, 0}));
}

TEST_F(ParameterBuffersTest, LoadingLeavesAutogradAndVersionsAlone) {
  make(uniform_infos(), 0, 2);
  const at::Tensor shard = buffers_->local_shard(0);
  const auto version = shard._version();
  const at::Tensor local = at::full({2, 4}, 3.0).set_requires_grad(true);
  buffers_->load_local(0, local);
  EXPECT_EQ(shard._version(), version);
  EXPECT_FALSE(shard.requires_grad());
  EXPECT_TRUE(shard.equal(local));
}

TEST_F(ParameterBuffersTest, HoldsExactlyTheBytesOfTheLayout) {
  make(mixed_infos(), 1, 3);
  std::vector<memory::ParameterShape> shapes;
  for (const auto& info : infos_) {
    shapes.push_back(
        {info.name, info.sizes,
         static_cast<std::int64_t>(c10::elementSize(info.storage_dtype)),
         static_cast<std::int64_t>(c10::elementSize(info.compute_dtype)),
         /*may_pack=*/info.storage_dtype != info.compute_dtype});
  }
  const memory::FlatLayout layout(3, shapes);
  EXPECT_EQ(live(Category::parameters), layout.shard_bytes());
  expect_sharded();

  const auto pending = buffers_->gather(*collectives_);
  EXPECT_EQ(live(Category::gathered), layout.gathered_bytes());
  // The cast shards, and on arrival the packed rows of three ranks.
  // "even", "uneven" and "one_row" in bf16, in multiples of 16 elements.
  const auto row = (16 + 16 + 144) * 2;
  EXPECT_EQ(live(Category::gather_input), layout.input_bytes() + 3 * row);
  EXPECT_EQ(buffers_->input_bytes(), layout.input_bytes() + 3 * row);
  pending->wait();
  buffers_->arrived();
  EXPECT_EQ(live(Category::gathered), layout.gathered_bytes());
  EXPECT_EQ(live(Category::gather_input), 0);
  buffers_->release();
  EXPECT_EQ(live(Category::gathered), 0);
  buffers_.reset();
  EXPECT_EQ(ledger_->total_live(), 0);
}

TEST_F(ParameterBuffersTest, WithoutACastTheMastersAreTheInput) {
  make(uniform_infos(), 0, 2);
  const auto pending = buffers_->gather(*collectives_);
  EXPECT_EQ(ledger_->num_leases(Category::gather_input), 0);
  EXPECT_EQ(buffers_->input_bytes(), 0);
  pending->wait();
  EXPECT_TRUE(buffers_->full(0).equal(full_[0]));
}

TEST_F(ParameterBuffersTest, OneCoalescedCallCarriesTheUnit) {
  make(mixed_infos(), 0, 2);
  gather_and_arrive();
  ASSERT_EQ(collectives_->calls().size(), 1u);
  const auto& call = collectives_->calls()[0];
  EXPECT_EQ(call.kind, comm::Kind::all_gather);
  EXPECT_EQ(call.label, kUnit);
  EXPECT_EQ(call.issued_from, device::Stream::gather);
  // Two have no elements; "even", "uneven" and "one_row" are cast, small and
  // packed.
  EXPECT_EQ(call.full_bytes.size(), 4u);
  EXPECT_EQ(call.full_bytes.back(), 2 * (16 + 16 + 144) * 2);
}

TEST_F(ParameterBuffersTest, LargeParametersAreGatheredStraightIntoPlace) {
  // Two that are small, two that are not.
  const auto info = [](std::string name, std::int64_t rows) {
    return ParameterInfo{
        std::move(name), {rows, 128}, at::kFloat, at::kBFloat16, at::kFloat};
  };
  make({info("large", 300), info("norm", 2), info("larger", 400),
        info("bias", 3)},
       1, 2);
  gather_and_arrive();
  for (std::size_t i = 0; i < infos_.size(); ++i) {
    EXPECT_TRUE(buffers_->full(i).equal(full_[i].to(at::kBFloat16))) << i;
  }
  EXPECT_EQ(collectives_->calls()[0].full_bytes,
            (std::vector<std::int64_t>{300 * 128 * 2, 400 * 128 * 2,
                                       2 * (128 + 256) * 2}));
  EXPECT_THAT(runtime_->violations(), IsEmpty());
}

TEST_F(ParameterBuffersTest, WithoutACastMastersAreThePackedRow) {
  make({{"norm", {4, 4}, at::kFloat, at::kFloat, at::kFloat},
        {"bias", {3}, at::kFloat, at::kFloat, at::kFloat}},
       0, 2);
  const auto pending = buffers_->gather(*collectives_);
  EXPECT_EQ(live(Category::gather_input), 2 * (16 + 16) * 4);
  pending->wait();
  buffers_->unpack();
  buffers_->arrived();
  for (std::size_t i = 0; i < infos_.size(); ++i) {
    EXPECT_TRUE(buffers_->full(i).equal(full_[i])) << i;
  }
  EXPECT_THAT(runtime_->violations(), IsEmpty());
}

TEST_F(ParameterBuffersTest, OneRankPacksNothing) {
  make(mixed_infos(), 0, 1);
  gather_and_arrive();
  EXPECT_EQ(collectives_->calls()[0].full_bytes.size(), 6u);
}

TEST_F(ParameterBuffersTest, AUnitWithoutElementsIssuesNothing) {
  make({{"none", {0, 4}, at::kFloat, at::kBFloat16, at::kFloat}}, 0, 2);
  EXPECT_EQ(buffers_->gather(*collectives_), nullptr);
  EXPECT_THAT(collectives_->calls(), IsEmpty());
  EXPECT_EQ(ledger_->total_live(), 0);
}

TEST_F(ParameterBuffersTest, GathersAgainAfterRelease) {
  make(mixed_infos(), 0, 2);
  const at::Tensor full = buffers_->full(0);
  for (int step = 0; step < 3; ++step) {
    gather_and_arrive();
    EXPECT_TRUE(full.equal(full_[0].to(at::kBFloat16)));
    buffers_->release();
  }
  EXPECT_EQ(ledger_->num_leases(Category::gathered), 3);
  EXPECT_EQ(full._version(), 0);
  EXPECT_THAT(runtime_->violations(), IsEmpty());
}

TEST_F(ParameterBuffersTest, AFailingLeaseLeavesEverythingAsItWas) {
  make(mixed_infos(), 0, 2);
  for (const Category category : {Category::gathered, Category::gather_input}) {
    memory_->fail_next_lease(category, kUnit);
    EXPECT_THROW(buffers_->gather(*collectives_), c10::OutOfMemoryError);
    expect_sharded();
    EXPECT_THAT(collectives_->calls(), IsEmpty());
  }
  gather_and_arrive();
  EXPECT_TRUE(buffers_->full(0).equal(full_[0].to(at::kBFloat16)));
  EXPECT_THAT(runtime_->violations(), IsEmpty());
}

TEST_F(ParameterBuffersTest, AFailingIssueLeavesEverythingAsItWas) {
  make(mixed_infos(), 0, 2);
  // A group of another size is refused before anything is on the wire.
  RecordingCollectives others(0, 3, runtime_);
  EXPECT_THROW(buffers_->gather(others), Error);
  expect_sharded();
  gather_and_arrive();
  EXPECT_TRUE(buffers_->full(0).equal(full_[0].to(at::kBFloat16)));
  EXPECT_THAT(runtime_->violations(), IsEmpty());
}

// Of several calls the first is on its way when the second can not be issued.
class BrokenOff final : public comm::Collectives {
 public:
  BrokenOff(std::int64_t size, std::shared_ptr<device::ScriptedRuntime> runtime)
      : size_(size), runtime_(std::move(runtime)) {}

  std::int64_t rank() const override { return 0; }
  std::int64_t size() const override { return size_; }
  std::string backend() const override { return "broken"; }

  std::unique_ptr<comm::Pending> all_gather(
      std::vector<at::Tensor>& outs, std::vector<at::Tensor>& /*ins*/,
      const std::string& /*label*/) override {
    runtime_->touches(runtime_->current(), outs[0].const_data_ptr(),
                      outs[0].nbytes(), device::Access::write);
    throw std::runtime_error("connection reset");
  }

  MOCK_METHOD(std::unique_ptr<comm::Pending>, reduce_scatter,
              (at::Tensor&, at::Tensor&, comm::Reduction, const std::string&),
              (override));
  MOCK_METHOD(std::unique_ptr<comm::Pending>, reduce_scatter_coalesced,
              (std::vector<at::Tensor>&, std::vector<at::Tensor>&,
               comm::Reduction, const std::string&),
              (override));
  MOCK_METHOD(std::unique_ptr<comm::Pending>, all_reduce,
              (at::Tensor&, comm::Reduction, const std::string&), (override));
  MOCK_METHOD(std::unique_ptr<comm::Pending>, all_to_all,
              (at::Tensor&, at::Tensor&, const std::string&), (override));
  MOCK_METHOD(std::vector<std::int64_t>, from_rank_zero,
              (std::vector<std::int64_t>, const std::string&), (override));

 private:
  std::int64_t size_;
  std::shared_ptr<device::ScriptedRuntime> runtime_;
};

TEST_F(ParameterBuffersTest, BytesOfAGatherThatBrokeOffGoBackBehindIt) {
  make(mixed_infos(), 0, 2);
  BrokenOff broken(2, runtime_);
  EXPECT_THROW(buffers_->gather(broken), std::runtime_error);
  expect_sharded();
  gather_and_arrive();
  EXPECT_TRUE(buffers_->full(0).equal(full_[0].to(at::kBFloat16)));
  EXPECT_THAT(runtime_->violations(), IsEmpty());
}

TEST_F(ParameterBuffersTest, BytesOfAGatherOfPartsThatBrokeOffGoBackBehindIt) {
  make(uniform_infos(), 0, 2);
  gather_and_arrive();
  buffers_->keep_part(0, 2);
  BrokenOff broken(2, runtime_);
  EXPECT_THROW(buffers_->gather_parts(broken), std::runtime_error);
  EXPECT_TRUE(buffers_->keeps_part());
  buffers_->drop_part();
  expect_sharded();
  EXPECT_THAT(runtime_->violations(), IsEmpty());
}

TEST_F(ParameterBuffersTest, AKeptBufferIsWrittenToBehindWhatReadsIt) {
  make(uniform_infos(), 0, 2);
  gather_and_arrive();
  const auto& full = buffers_->full(0);
  const auto* const place = full.const_data_ptr();
  const auto bytes = live(Category::gathered);
  for (const bool of_parts : {false, true}) {
    runtime_->touches(device::Stream::compute, place, full.nbytes(),
                      device::Access::read);
    if (of_parts) {
      buffers_->keep_part(0, 2, /*keep=*/true);
    }
    EXPECT_TRUE(buffers_->bound());
    full.zero_();
    gather_and_arrive();
    buffers_->drop_part();
    EXPECT_EQ(full.const_data_ptr(), place);
    EXPECT_EQ(live(Category::gathered), bytes);
    EXPECT_TRUE(full.equal(full_[0]));
  }
  buffers_->release();
  EXPECT_FALSE(buffers_->bound());
  expect_sharded();
  EXPECT_THAT(runtime_->violations(), IsEmpty());
}

TEST_F(ParameterBuffersTest, AMasterThatDoesNotFitIsAnError) {
  memory_->fail_next_lease(Category::parameters, kUnit);
  EXPECT_THROW(make(uniform_infos(), 0, 2), c10::OutOfMemoryError);
  EXPECT_EQ(ledger_->total_live(), 0);
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::shard
