#include "phantom/device/device_hooks.h"

#include <memory>

#include "phantom/device/generator.h"
#include "phantom/device/phantom_device.h"
#include "phantom/device/pinned_memory.h"
#include "phantom/device/storage.h"

namespace lowtide::phantom {
namespace {

using c10::DeviceIndex;

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return is_installed(); }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  void init() const override {}

  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex index) const override { require(index); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    return maybeExchangeDevice(index);
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    require(index);
    return 0;
  }

  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    return default_generator();
  }
  at::Generator getNewGenerator(DeviceIndex) const override {
    return at::make_generator<PhantomGenerator>();
  }

  c10::Device getDeviceFromPtr(void*) const override { return kPhantomDevice; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_memory();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage,
                              std::size_t bytes) const override {
    resize_storage(*storage.unsafeGetStorageImpl(), bytes);
  }

 private:
  static void require(DeviceIndex index) {
    require_device(c10::Device(kPhantom, index));
  }
};

}  // namespace

at::PrivateUse1HooksInterface& device_hooks() {
  static auto* hooks = std::make_unique<Hooks>().release();
  return *hooks;
}

}  // namespace lowtide::phantom
