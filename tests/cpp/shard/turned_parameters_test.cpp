#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "buffers_fixture.h"

namespace lowtide::shard {
namespace LOWTIDE_FILE {

using comm::RecordingCollectives;
using memory::Category;
using testing::IsEmpty;

constexpr auto kUnit = "layers.0";

std::int64_t numel_of(const ParameterInfo& info) {
  std::int64_t numel = 1;
  for (const auto size : info.sizes) numel *= size;
  return numel;
}

// A router and experts: dims 0, 1, 2 and -1, cast and not; the bias alone would
// be packed, two of the small ones are.
std::vector<ParameterInfo> experts() {
  const auto info = [](std::string name, std::vector<std::int64_t> sizes,
                       std::int64_t dim, at::ScalarType storage = at::kFloat) {
    ParameterInfo info{std::move(name), std::move(sizes), storage,
                       at::kBFloat16, at::kFloat};
    info.shard_dim = dim;
    return info;
  };
  return {
      info("router", {300, 128}, 0),
      info("up", {3, 64, 240}, 1),
      info("down", {3, 240, 60}, 2),
      info("as_it_is", {2, 60, 16}, 1, at::kBFloat16),
      info("bias", {3, 60}, 1),
      info("norm", {7}, 0),
      info("more", {3, 64, 240}, 1),
  };
}

class TurnedParametersTest : public BuffersFixture {
 protected:
  void make(std::int64_t rank, std::int64_t size) {
    infos_ = experts();
    buffers_.emplace(std::make_shared<const std::string>(kUnit), infos_, size,
                     rank, memory_);
    full_.clear();
    pieces_.clear();
    for (std::size_t i = 0; i < infos_.size(); ++i) {
      const auto& info = infos_[i];
      full_.push_back(at::arange(numel_of(info), at::kFloat)
                          .mul(0.25)
                          .add(static_cast<double>(i))
                          .remainder(97)
                          .view(info.sizes)
                          .to(info.storage_dtype));
      // As the ranks see it: `size` pieces along the dimension, padded.
      const auto rows = (info.sizes[info.shard_dim] + size - 1) / size;
      std::vector<at::Tensor> pieces;
      for (std::int64_t r = 0; r < size; ++r) {
        const auto first = std::min(r * rows, info.sizes[info.shard_dim]);
        const auto count = std::min(rows, info.sizes[info.shard_dim] - first);
        pieces.push_back(
            full_[i].narrow(info.shard_dim, first, count).contiguous());
      }
      if (pieces[rank].numel() > 0) buffers_->load_local(i, pieces[rank]);
      pieces_.push_back(std::move(pieces));
    }
    collectives_.emplace(
        rank, size, runtime_,
        [this](const RecordingCollectives::Request& request,
               const at::Tensor& mine) { return sent(request, mine); });
  }

  at::Tensor sent(const RecordingCollectives::Request& request,
                  const at::Tensor& mine) const {
    at::Tensor bytes = at::zeros_like(mine);
    const auto put = [&](std::size_t i, std::int64_t at) {
      const auto piece = pieces_[i][request.rank]
                             .to(infos_[i].compute_dtype)
                             .view({-1})
                             .view(at::kByte);
      if (at + piece.numel() <= bytes.numel()) {
        bytes.narrow(0, at, piece.numel()).copy_(piece);
      }
    };
    std::size_t seen = 0;
    for (const auto i : buffers_->layout().order()) {
      if (!buffers_->slice(i).packed && seen++ == request.index) {
        put(i, 0);
        return bytes;
      }
    }
    for (std::size_t i = 0; i < infos_.size(); ++i) {
      if (buffers_->slice(i).packed) put(i, buffers_->slice(i).input_offset);
    }
    return bytes;
  }

  void expect_full() const {
    for (std::size_t i = 0; i < infos_.size(); ++i) {
      SCOPED_TRACE(infos_[i].name);
      const auto& full = buffers_->full(i);
      EXPECT_TRUE(full.is_contiguous());
      EXPECT_TRUE(full.equal(full_[i].to(infos_[i].compute_dtype)));
    }
  }

  std::vector<ParameterInfo> infos_;
  std::vector<at::Tensor> full_;
  std::vector<std::vector<at::Tensor>> pieces_;
};

constexpr std::int64_t kUp = std::int64_t{3} * 64 * 240 * 2;
constexpr std::int64_t kDown = std::int64_t{3} * 240 * 60 * 2;

TEST_F(TurnedParametersTest, TheFullParameterIsTheRanksPiecesSideBySide) {
  for (const std::int64_t size : {1, 2, 4}) {
    for (std::int64_t rank = 0; rank < size; ++rank) {
      make(rank, size);
      for (int again = 0; again < 2; ++again) {
        gather_and_arrive();
        expect_full();
        EXPECT_EQ(buffers_->gathered_bytes(), live(Category::gathered));
        buffers_->release();
        EXPECT_EQ(live(Category::gathered), 0);
        EXPECT_EQ(buffers_->storage(1).data(), nullptr);
      }
    }
  }
  EXPECT_THAT(runtime_->violations(), IsEmpty());
}

TEST_F(TurnedParametersTest, OneAtATimeIsThereTwice) {
  make(0, 2);
  const auto pending = buffers_->gather(*collectives_);
  const auto input = live(Category::gather_input);
  EXPECT_EQ(input, buffers_->input_bytes());
  const auto others = live(Category::gathered);
  EXPECT_EQ(others, buffers_->gathered_bytes() - 2 * kUp - kDown -
                        /*as_it_is*/ 2 * 60 * 16 * 2);
  pending->wait();
  ledger_->reset_peaks();
  buffers_->unpack();
  EXPECT_EQ(ledger_->total_peak(),
            buffers_->shard_bytes() + others + input + kUp);
  buffers_->arrived();
  EXPECT_EQ(live(Category::gather_input), 0);
}

TEST_F(TurnedParametersTest, APlaceThatDoesNotFitIsLeasedByTheNextCall) {
  make(1, 2);
  const auto pending = buffers_->gather(*collectives_);
  pending->wait();
  memory_->fail_next_lease(Category::gathered, kUnit);
  EXPECT_THROW(buffers_->unpack(), c10::OutOfMemoryError);
  buffers_->unpack();
  buffers_->arrived();
  expect_full();
  buffers_->release();
  memory_->fail_next_lease(Category::gather_input, kUnit);
  EXPECT_THROW(buffers_->gather(*collectives_), c10::OutOfMemoryError);
  EXPECT_FALSE(buffers_->bound());
  EXPECT_EQ(ledger_->total_live(), buffers_->shard_bytes());
  EXPECT_THAT(runtime_->violations(), IsEmpty());
}

TEST_F(TurnedParametersTest, PartsAreKeptAndGatheredIntoPlace) {
  make(0, 2);
  gather_and_arrive();
  // What the other rank keeps: the second half of every run.
  std::vector<at::Tensor> second;
  for (std::size_t i = 0; i < infos_.size(); ++i) {
    const auto& slice = buffers_->slice(i);
    const auto* begin = static_cast<const char*>(buffers_->storage(i).data());
    const auto half = slice.gathered_bytes / 2;
    second.push_back(
        at::from_blob(const_cast<char*>(begin) + half, {half}, at::kByte)
            .clone());
  }
  buffers_->keep_part(0, 2);
  EXPECT_FALSE(buffers_->bound());
  // Those of the buffer first, then those with places of their own.
  std::vector<std::size_t> runs;
  for (const bool apart : {false, true}) {
    for (std::size_t i = 0; i < infos_.size(); ++i) {
      if (buffers_->slice(i).apart == apart) runs.push_back(i);
    }
  }
  RecordingCollectives parts(
      0, 2, runtime_,
      [&](const RecordingCollectives::Request& request, const at::Tensor&) {
        return second[runs[request.index]];
      });
  buffers_->gather_parts(parts)->wait();
  buffers_->drop_part();
  expect_full();
  buffers_->release();
  EXPECT_EQ(ledger_->total_live(), buffers_->shard_bytes());
  EXPECT_THAT(runtime_->violations(), IsEmpty());
}

TEST_F(TurnedParametersTest, AKeptBufferIsWrittenToWhereItIs) {
  make(0, 2);
  gather_and_arrive();
  const auto* const place = buffers_->storage(1).data();
  for (std::size_t i = 0; i < infos_.size(); ++i) buffers_->full(i).zero_();
  gather_and_arrive();
  expect_full();
  EXPECT_EQ(buffers_->storage(1).data(), place);
  EXPECT_EQ(live(Category::gathered), buffers_->gathered_bytes());
  EXPECT_THAT(runtime_->violations(), IsEmpty());
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::shard
