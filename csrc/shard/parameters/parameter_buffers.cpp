#include "shard/parameters/parameter_buffers.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/util/Logging.h>
#include <c10/util/accumulate.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <optional>
#include <string>

#include "base/check.h"
#include "ops/foreach.h"
#include "shard/parameters/gathering.h"
#include "shard/policy.h"

namespace lowtide::shard {
namespace {

// See [Note: Other dimensions].
void require_splittable(const ParameterInfo& info, std::int64_t world_size) {
  if (info.shard_dim == 0) {
    return;
  }
  const auto size = info.sizes[static_cast<std::size_t>(info.shard_dim)];
  if (size % world_size != 0) {
    throw InvalidArgument(
        base::error_text(info.name,
                         base::concat("dimension ", info.shard_dim,
                                      ", which is to be split, of a "
                                      "multiple of ",
                                      world_size, " elements"),
                         base::concat(size),
                         "Return Shard(0) for it from shard_placement_fn, "
                         "which may be uneven."));
  }
}

memory::FlatLayout lay_out(const ParameterInfos& infos,
                           std::int64_t world_size) {
  const auto casts = [](const ParameterInfo& info) { return info.casts(); };
  // A packed row is one piece of either the cast shards or the masters.
  const bool any = std::any_of(infos.begin(), infos.end(), casts);
  std::vector<memory::ParameterShape> shapes;
  shapes.reserve(infos.size());
  for (const auto& info : infos) {
    const auto numel = c10::multiply_integers(info.sizes);
    const bool small =
        numel * itemsize(info.compute_dtype) <= packed_bytes(world_size);
    const bool dim0 = info.shard_dim == 0;
    const bool here = !info.extended;
    require_splittable(info, world_size);
    shapes.push_back({info.name,
                      dim0 ? info.sizes : std::vector<std::int64_t>{numel},
                      here ? itemsize(info.storage_dtype) : 0,
                      here ? itemsize(info.compute_dtype) : 0,
                      here && small && casts(info) == any, here && !dim0});
  }
  return {world_size, shapes};
}

// lowtide's own copies are invisible to autograd and to version counters.
using BelowAutograd = at::AutoDispatchBelowADInplaceOrView;

}  // namespace

ParameterBuffers::ParameterBuffers(UnitName unit, ParameterInfos infos,
                                   std::int64_t world_size, std::int64_t rank,
                                   std::shared_ptr<memory::DeviceMemory> memory,
                                   std::shared_ptr<memory::HostMemory> host)
    : unit_(std::move(unit)),
      infos_(std::move(infos)),
      rank_(rank),
      memory_(std::move(memory)),
      layout_(lay_out(infos_, world_size)),
      extended_(unit_, world_size, memory_),
      turned_(unit_, memory_),
      host_(std::move(host)),
      staged_(memory_->runtime().device()),
      input_(memory_->runtime().device()),
      kept_(unit_, memory_),
      gathered_(memory_->runtime().device()) {
  constexpr auto kCategory = memory::Category::parameters;
  auto lease = host_ != nullptr
                   ? host_->lease(kCategory, *unit_, layout_.shard_bytes())
                   : memory_->lease(kCategory, *unit_, layout_.shard_bytes());
  master_ = owning_storage(std::move(lease), layout_.shard_bytes());
  const BelowAutograd guard;
  flat_view(master_, at::kByte, 0, layout_.shard_bytes()).zero_();
  build_parameters();
  build_gather_lists();
  build_casts();
  build_unpacks();
}

at::Tensor ParameterBuffers::on_device(at::ScalarType dtype,
                                       std::int64_t byte_offset,
                                       std::int64_t numel) const {
  return host_ != nullptr
             ? staged_.view(dtype, {numel}, {1}, byte_offset / itemsize(dtype))
             : flat_view(master_, dtype, byte_offset, numel);
}

bool ParameterBuffers::stages_in_gathered() const {
  for (std::size_t i = 0; i < infos_.size(); ++i) {
    if (layout_[i].gathered_bytes > 0 && !casts(i)) return false;
  }
  return shard_bytes() <= layout_.gathered_bytes();
}

std::int64_t ParameterBuffers::cast_bytes() const {
  return casts_.to.empty() ? 0 : layout_.input_bytes();
}

void ParameterBuffers::build_parameters() {
  for (std::size_t i = 0; i < infos_.size(); ++i) {
    const auto& info = infos_[i];
    RepointedStorage storage(memory_->runtime().device(),
                             layout_[i].gathered_bytes);
    auto full = storage.view(info.compute_dtype, info.sizes,
                             c10::contiguous_strides(info.sizes));
    parameters_.push_back({std::move(storage), std::move(full),
                           sub_storage(master_, layout_[i].shard_offset,
                                       layout_[i].shard_bytes)});
  }
  set_read_errors();
}

void ParameterBuffers::set_read_errors() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    parameters_[i].storage.set_read_error(read_error(*unit_, infos_[i].name));
  }
  extended_.set_read_errors();
}

void ParameterBuffers::build_gather_lists() {
  for (const auto i : layout_.order()) {
    const auto& slice = layout_[i];
    if (slice.gathered_bytes == 0 || slice.packed) {
      continue;
    }
    gather_outs_.push_back(
        slice.apart ? turned_.add(i, infos_[i], layout_.world_size())
                    : gathered_.view(at::kByte, {slice.gathered_bytes}, {1},
                                     slice.gathered_offset));
    gather_ins_.push_back(
        casts(i) ? input_.view(at::kByte, {slice.input_bytes}, {1},
                               slice.input_offset)
                 : on_device(at::kByte, slice.shard_offset, slice.shard_bytes));
  }
}

void ParameterBuffers::build_casts() {
  std::optional<std::size_t> before;  // the parameter the last run ends with
  for (const auto i : layout_.order()) {
    const auto& info = infos_[i];
    const auto& slice = layout_[i];
    const bool extends = before && layout_[*before].packed == slice.packed &&
                         infos_[*before].storage_dtype == info.storage_dtype &&
                         infos_[*before].compute_dtype == info.compute_dtype;
    before.reset();
    if (!casts(i)) {
      continue;
    }
    before = i;
    const auto from_input = slice.input_offset / itemsize(info.compute_dtype);
    const auto start = extends ? casts_.to.back().storage_offset() : from_input;
    const auto numel = from_input + slice.shard_numel - start;
    const auto from_master = slice.shard_offset / itemsize(info.storage_dtype) -
                             (from_input - start);
    if (extends) {
      casts_.to.pop_back();
      casts_.from.pop_back();
    }
    casts_.to.push_back(input_.view(info.compute_dtype, {numel}, {1}, start));
    casts_.from.push_back(on_device(
        info.storage_dtype, from_master * itemsize(info.storage_dtype), numel));
  }
}

// The packed row is the beginning of the cast shards or of the masters, its
// matrix follows the cast shards.
void ParameterBuffers::build_unpacks() {
  const auto row = layout_.packed_row_bytes();
  if (row == 0) {
    return;
  }
  const auto size = layout_.world_size();
  gather_outs_.push_back(
      input_.view(at::kByte, {size * row}, {1}, cast_bytes()));
  gather_ins_.push_back(casts_.to.empty() ? on_device(at::kByte, 0, row)
                                          : input_.view(at::kByte, {row}, {1}));
  for (const auto i : layout_.order()) {
    const auto& slice = layout_[i];
    if (!slice.packed) {
      continue;
    }
    const auto dtype = infos_[i].compute_dtype;
    const auto [outer, ranks, width] =
        infos_[i].shard_dim == 0
            ? std::array<std::int64_t, 3>{1, size, slice.shard_numel}
            : infos_[i].split(size);
    const std::int64_t sizes[] = {outer, ranks, width};
    const std::int64_t packed[] = {width, row / itemsize(dtype), 1};
    const std::int64_t in_place[] = {ranks * width, width, 1};
    unpacks_.from.push_back(
        input_.view(dtype, sizes, packed,
                    (cast_bytes() + slice.input_offset) / itemsize(dtype)));
    unpacks_.to.push_back(gathered_.view(
        dtype, sizes, in_place, slice.gathered_offset / itemsize(dtype)));
  }
}

at::Tensor ParameterBuffers::local_shard(std::size_t i) const {
  const auto& info = infos_[i];
  const auto sizes =
      info.local_sizes(layout_.world_size(), layout_[i].local_rows(rank_));
  const BelowAutograd guard;
  return flat_view(parameters_[i].shard, info.storage_dtype, 0,
                   layout_[i].local_numel(rank_))
      .view(sizes);
}

at::Tensor ParameterBuffers::padded_rows(std::size_t i, std::int64_t begin,
                                         std::int64_t end) const {
  const auto& slice = layout_[i];
  const auto row_bytes = slice.inner * itemsize(infos_[i].storage_dtype);
  return flat_view(master_, infos_[i].storage_dtype,
                   slice.shard_offset + begin * row_bytes,
                   (end - begin) * slice.inner);
}

void ParameterBuffers::load_full(std::size_t i, const at::Tensor& full) {
  const auto rows = layout_[i].local_rows(rank_);
  if (rows > 0) {
    load_local(i,
               full.detach().narrow(0, rank_ * layout_[i].padded_rows, rows));
  }
}

void ParameterBuffers::load_local(std::size_t i, const at::Tensor& local) {
  const auto shard = local_shard(i);
  const BelowAutograd guard;
  shard.copy_(local.detach());
}

std::unique_ptr<comm::Pending> ParameterBuffers::gather(
    comm::Collectives& group, GatherTime* time) {
  if (gather_outs_.empty() && !extended_.any()) {
    return nullptr;
  }
  prepare_extended();
  auto gathered = lease_gathered();
  constexpr auto kInput = memory::Category::gather_input;
  auto input = memory_->lease(kInput, *unit_, own_input_bytes());
  auto staged = memory_->lease(kInput, *unit_, staged_bytes());
  // Last: it goes first, and what stays lies below it.
  c10::DataPtr passing;
  if (extended_.passing_bytes() > 0) {
    passing = memory_->lease(memory::Category::gathered, *unit_,
                             extended_.passing_bytes());
  }
  turned_.lease_arriving();
  bind_gathered(std::move(gathered));
  if (extended_.passing_bytes() > 0) {
    extended_.own_passing(std::move(passing));
  }
  if (own_input_bytes() > 0) {
    input_.own(std::move(input), own_input_bytes());
  }
  if (staged_bytes() > 0) {
    staged_.own(std::move(staged), staged_bytes());
  } else if (stages()) {
    staged_.bind(gathered_.mutable_data(), shard_bytes());
  }
  return issue_gather(
      memory_->runtime(),
      [&] {
        stage_master();
        cast_masters();
        return time == nullptr ? issue(group)
                               : time->time(memory_->runtime(),
                                            [&] { return issue(group); });
      },
      [&] {
        arrived();
        drop();
      });
}

std::unique_ptr<comm::Pending> ParameterBuffers::gather_parts(
    comm::Collectives& group) {
  auto gathered = lease_gathered();
  turned_.lease_places();
  bind_gathered(std::move(gathered));
  bind_turned();
  return issue_gather(
      memory_->runtime(),
      [&] {
        auto [outs, ins] = kept_.lists(runs(), group.size());
        return group.all_gather(outs, ins, *unit_);
      },
      [&] { drop(); });
}

void ParameterBuffers::keep_part(std::int64_t index, std::int64_t parts,
                                 bool keep) {
  if (!keep) {
    require_no_array();
  }
  kept_.keep(runs(), index, parts);
  if (!keep) {
    drop();
  }
}

std::vector<KeptPart::Run> ParameterBuffers::runs() const {
  std::vector<KeptPart::Run> runs;
  for (std::size_t i = 0; i < layout_.size(); ++i) {
    if (!layout_[i].apart) {
      runs.push_back(
          {&gathered_, layout_[i].gathered_offset, layout_[i].gathered_bytes});
    }
  }
  turned_.append_runs(runs);
  for (const auto& extent : extended_.extents()) {
    LOWTIDE_INVARIANT(!extent.passes, "what parts are kept of stays");
    runs.push_back(
        {&gathered_, layout_.gathered_bytes() + extent.offset, extent.bytes});
  }
  return runs;
}

void ParameterBuffers::prepare_extended() {
  if (!extended_.any()) {
    return;
  }
  auto& runtime = memory_->runtime();
  runtime.wait(device::Stream::gather, runtime.record(device::Stream::compute));
  const device::StreamScope scope(runtime, device::Stream::gather);
  extended_.prepare();
}

std::unique_ptr<comm::Pending> ParameterBuffers::issue(
    comm::Collectives& group) {
  if (!extended_.any()) {
    return group.all_gather(gather_outs_, gather_ins_, *unit_);
  }
  auto outs = gather_outs_;
  auto ins = gather_ins_;
  for (std::size_t k = 0; k < extended_.extents().size(); ++k) {
    const auto& extent = extended_.extents()[k];
    if (extent.bytes > 0) {
      outs.push_back(
          extent.passes
              ? extended_.passing(k)
              : gathered_.view(at::kByte, {extent.bytes}, {1},
                               layout_.gathered_bytes() + extent.offset));
      ins.push_back(extended_.inputs()[k]);
    }
  }
  return outs.empty() ? nullptr : group.all_gather(outs, ins, *unit_);
}

c10::DataPtr ParameterBuffers::lease_gathered() const {
  return bound_ ? c10::DataPtr()
                : memory_->lease(memory::Category::gathered, *unit_,
                                 buffer_bytes());
}

void ParameterBuffers::bind_gathered(c10::DataPtr lease) {
  if (bound_) {
    return;
  }
  bound_ = true;
  gathered_.own(std::move(lease), buffer_bytes());
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!layout_[i].apart) {
      parameters_[i].storage.bind_within(gathered_, layout_[i].gathered_offset,
                                         layout_[i].gathered_bytes);
    }
  }
  extended_.bind_within(gathered_, layout_.gathered_bytes());
}

void ParameterBuffers::bind_turned() {
  turned_.for_each_place(
      [this](std::size_t i, const RepointedStorage& place, std::int64_t bytes) {
        parameters_[i].storage.bind_within(place, 0, bytes);
      });
}

// One copy, gaps of alignment included.
void ParameterBuffers::stage_master() {
  if (!stages()) {
    return;
  }
  memory_->runtime().wait(
      device::Stream::gather,
      host_->to_device(staged_.mutable_data(), data_or_null(master_),
                       shard_bytes()));
}

void ParameterBuffers::cast_masters() {
  auto& runtime = memory_->runtime();
  const BelowAutograd guard;
  for (std::size_t k = 0; k < casts_.to.size(); ++k) {
    const auto& to = casts_.to[k];
    const auto& from = casts_.from[k];
    runtime.touches(device::Stream::gather, from.const_data_ptr(),
                    from.nbytes(), device::Access::read);
    runtime.touches(device::Stream::gather, to.const_data_ptr(), to.nbytes(),
                    device::Access::write);
  }
  ops::foreach_copy(casts_.to, casts_.from);
}

void ParameterBuffers::unpack() {
  auto& runtime = memory_->runtime();
  const BelowAutograd guard;
  for (std::size_t k = 0; k < unpacks_.to.size(); ++k) {
    const auto& to = unpacks_.to[k];
    const auto& packed = unpacks_.from[k];
    const auto extent = (packed.size(1) - 1) * packed.stride(1) +
                        packed.size(0) * packed.size(2);
    runtime.touches(device::Stream::compute, packed.const_data_ptr(),
                    static_cast<std::size_t>(extent) * packed.itemsize(),
                    device::Access::read);
    runtime.touches(device::Stream::compute, to.const_data_ptr(), to.nbytes(),
                    device::Access::write);
  }
  ops::foreach_copy(unpacks_.to, unpacks_.from);
  turned_.put_in_place();
  bind_turned();
}

void ParameterBuffers::arrived() {
  input_.unbind();
  staged_.unbind();
  turned_.drop_arriving();
  extended_.drop_inputs();
}

std::optional<std::string> ParameterBuffers::array_error() const {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].storage.has_array()) {
      return base::error_text(
          infos_[i].name,
          base::concat("no NumPy array of it when its unit '", *unit_,
                       "' gives its bytes back"),
          "one that .numpy() made, which would show freed memory",
          "Take the array of a copy: .clone().numpy().");
    }
  }
  return std::nullopt;
}

void ParameterBuffers::require_no_array() const {
  if (const auto error = array_error()) {
    throw Error(*error);
  }
}

void ParameterBuffers::release() {
  require_no_array();
  drop();
}

void ParameterBuffers::drop() {
  if (const auto error = array_error()) {
    LOG(WARNING) << *error;
  }
  for (auto& parameter : parameters_) {
    parameter.storage.unbind();
  }
  extended_.unbind();
  turned_.drop();
  gathered_.unbind();
  bound_ = false;
}

}  // namespace lowtide::shard
