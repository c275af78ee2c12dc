// A directory that stands for /sys: what the system says of one PCI device.
// Without std::filesystem: libtorch.so exports a part of another one.
#pragma once

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

namespace lowtide::device {

class FakeSysfs {
 public:
  explicit FakeSysfs(const std::string& address)
      : root_(testing::TempDir() + "lowtide_sysfs_XXXXXX") {
    EXPECT_NE(mkdtemp(root_.data()), nullptr);
    made_.push_back(root_);
    for (const auto& name : {std::string("bus"), std::string("pci"),
                             std::string("devices"), address}) {
      made_.push_back(made_.back() + "/" + name);
      EXPECT_EQ(mkdir(made_.back().c_str(), S_IRWXU), 0);
    }
  }
  ~FakeSysfs() {
    unlink(list().c_str());
    while (!made_.empty()) {
      rmdir(made_.back().c_str());
      made_.pop_back();
    }
  }
  FakeSysfs(const FakeSysfs&) = delete;
  FakeSysfs& operator=(const FakeSysfs&) = delete;

  const std::string& root() const { return root_; }
  void write_cpus(const std::string& text) const {
    std::ofstream(list()) << text;
  }

 private:
  std::string list() const { return made_.back() + "/local_cpulist"; }

  std::string root_;
  std::vector<std::string> made_;  // outermost first
};

}  // namespace lowtide::device
