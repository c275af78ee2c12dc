// The bytes behind one unit's parameters: this rank's shards, and, while the
// unit is unsharded, the full parameters.
//
//   master    one flat buffer of shards, for the lifetime of the model; what
//             optimizers update and `.to_local()` shows; on the host if the
//             unit is offloaded
//   staged    while a gather is on its way, of a master on the host: its copy;
//             in the gathered buffer, if all of it is cast before that is
//             written
//   input     while a gather is on its way: the shards in the compute dtype if
//             that differs, and small parameters of all ranks as they arrive,
//             packed (see [Note: Packed parameters] in flat_layout.h)
//   gathered  every parameter's N pieces in rank order: the full parameter is
//             its first rows, so the gather writes straight into place; others
//             have places of their own (turned_parameters.h)
//
// Streams: leases and releases are in the compute stream's order, the cast and
// the collective run on `gather` behind an event, and behind the copy of a
// master on the host, which runs on `reload`.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/collectives.h"
#include "memory/device_memory.h"
#include "memory/flat_layout.h"
#include "memory/host_memory.h"
#include "shard/parameter_info.h"
#include "shard/parameters/all_gather_extension.h"
#include "shard/parameters/gather_time.h"
#include "shard/parameters/kept_part.h"
#include "shard/parameters/turned_parameters.h"
#include "shard/storage.h"
#include "shard/unit_name.h"

namespace lowtide::shard {

class ParameterBuffers {
 public:
  // Leases the master buffer, zeroed (padding rows are gathered too); `host`:
  // where it is, if not on the device.
  ParameterBuffers(UnitName unit, ParameterInfos infos, std::int64_t world_size,
                   std::int64_t rank,
                   std::shared_ptr<memory::DeviceMemory> memory,
                   std::shared_ptr<memory::HostMemory> host = nullptr);

  std::size_t size() const { return parameters_.size(); }
  const memory::FlatLayout& layout() const { return layout_; }
  const memory::ParameterSlice& slice(std::size_t i) const {
    return layout_[i];
  }

  // This rank's rows of parameter i, [local_rows, ...], in the master.  At
  // offset 0 of a storage of its own: torch tells a DTensor without data from
  // one with data by a data pointer that includes the storage offset.
  // One storage for all of them, which may sleep (sleeping_bytes.h).
  at::Tensor local_shard(std::size_t i) const;
  // Rows [begin, end) of this rank's padded piece, flat, in the storage dtype;
  // rows beyond the parameter are zero.  On the host if the master is.
  at::Tensor padded_rows(std::size_t i, std::int64_t begin,
                         std::int64_t end) const;
  // The full parameter's data; its storage has no bytes unless gathered.
  const at::Tensor& full(std::size_t i) const { return parameters_[i].full; }
  const RepointedStorage& storage(std::size_t i) const {
    return parameters_[i].storage;
  }

  // The master's bytes wait on the host.
  bool asleep() const {
    return shard_bytes() > 0 && data_or_null(master_) == nullptr;
  }

  // Copies this rank's rows of a full tensor / a local tensor into the master.
  void load_full(std::size_t i, const at::Tensor& full);  // dim 0 only
  void load_local(std::size_t i, const at::Tensor& local);

  // What is sent for the parameters that are `extended`, and what that becomes.
  void use(std::unique_ptr<AllGatherExtension> extension) {
    extended_.use(std::move(extension));
  }

  // Leases the gathered buffer, points every parameter at it and issues one
  // coalesced all-gather.  Nothing has changed if it throws.  `time`, if any,
  // takes its time.
  std::unique_ptr<comm::Pending> gather(comm::Collectives& group,
                                        GatherTime* time = nullptr);
  // After the gather was waited for, on the compute stream: copies parameters
  // into place that did not arrive there.  If that throws, the next call goes
  // on with what is left.
  void unpack();
  // Behind that: `extended` parameters, in their order, that were made now and
  // for good; `from_parts`: of a gather by gather_parts.
  std::vector<at::Tensor> make_extended(bool from_parts) {
    return extended_.arrived(from_parts);
  }
  // See [Note: Kept parts]; only where none of `extended` passes.
  //
  // Copies part `index` out of the gathered buffer, which is then released, or
  // stays for the next gather (`keep`).
  void keep_part(std::int64_t index, std::int64_t parts, bool keep = false);
  bool keeps_part() const { return kept_.any(); }
  // The same as `gather`, from the parts that the ranks of `group` kept.
  std::unique_ptr<comm::Pending> gather_parts(comm::Collectives& group);
  void drop_part() { kept_.drop(); }

  // Gives the input buffers back.
  void arrived();
  // Whether there is a gathered buffer.  The next gather writes to it, else to
  // a new one.
  bool bound() const { return bound_; }
  // Gives the gathered buffer back; every parameter's storage is unbound.
  // Throws, and nothing has changed, if an array of a parameter is out; drop()
  // only warns of it.
  void release();
  void drop();
  // The infos have other names: so do errors from now on.
  void names_changed() { set_read_errors(); }

  // Those of `extended` parameters are known from the first gather on; those
  // that pass come on top until the gather has arrived.
  std::int64_t gathered_bytes() const {
    return buffer_bytes() + turned_.bytes();
  }
  std::int64_t passing_bytes() const { return extended_.passing_bytes(); }
  std::int64_t shard_bytes() const { return layout_.shard_bytes(); }
  // Of both input buffers, and of what arrives elsewhere than in its place.
  std::int64_t input_bytes() const {
    return staged_bytes() + own_input_bytes() + turned_.bytes();
  }
  // Null if the master is on the device.
  memory::HostMemory* host() const { return host_.get(); }

 private:
  struct Parameter {
    RepointedStorage storage;
    at::Tensor full;
    c10::Storage shard;  // within the master
  };
  struct Copies {
    std::vector<at::Tensor> to;
    std::vector<at::Tensor> from;
  };

  bool casts(std::size_t i) const { return infos_[i].casts(); }
  // Of the gathered buffer.
  std::int64_t buffer_bytes() const {
    return layout_.gathered_bytes() + extended_.bytes();
  }
  // Bytes of the cast shards in the input buffer; packed parameters follow.
  std::int64_t cast_bytes() const;
  std::int64_t own_input_bytes() const {
    return cast_bytes() + layout_.world_size() * layout_.packed_row_bytes();
  }
  bool stages() const { return host_ != nullptr && !gather_outs_.empty(); }
  bool stages_in_gathered() const;
  std::int64_t staged_bytes() const {
    return stages() && !stages_in_gathered() ? shard_bytes() : 0;
  }
  // A contiguous 1-D tensor over part of the shards, as a gather reads them:
  // the master, or its copy.
  at::Tensor on_device(at::ScalarType dtype, std::int64_t byte_offset,
                       std::int64_t numel) const;
  void stage_master();
  void build_parameters();
  void set_read_errors();
  std::optional<std::string> array_error() const;
  void require_no_array() const;
  void build_gather_lists();
  void build_casts();
  void build_unpacks();
  void cast_masters();
  c10::DataPtr lease_gathered() const;
  void bind_gathered(c10::DataPtr lease);
  void bind_turned();
  void prepare_extended();
  std::unique_ptr<comm::Pending> issue(comm::Collectives& group);
  std::vector<KeptPart::Run> runs() const;

  UnitName unit_;
  ParameterInfos infos_;
  std::int64_t rank_;
  std::shared_ptr<memory::DeviceMemory> memory_;
  memory::FlatLayout layout_;
  ExtendedParameters extended_;  // behind the layout's bytes
  TurnedParameters turned_;
  std::shared_ptr<memory::HostMemory> host_;
  c10::Storage master_;
  RepointedStorage staged_;
  RepointedStorage input_;
  KeptPart kept_;
  // What the collective writes to.  Not the parameters' own storages: a process
  // group may drop its references late, and use counts of those storages tell
  // what autograd saved ([Note: Saved parameters]).
  RepointedStorage gathered_;
  bool bound_ = false;
  std::vector<Parameter> parameters_;
  // Masters to the gather's input; neighbours of one dtype pair are one run.
  Copies casts_;
  // Packed parameters to their places: [N, shard_numel], or [outer, N, width]
  // if another dimension is split.
  Copies unpacks_;
  std::vector<at::Tensor> gather_outs_;  // uint8, per parameter
  std::vector<at::Tensor> gather_ins_;
};

}  // namespace lowtide::shard
