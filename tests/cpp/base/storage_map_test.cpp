#include "base/storage_map.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <vector>

namespace lowtide::base {
namespace LOWTIDE_FILE {

TEST(StorageMapTest, ViewsAndAliasesFindWhatTheirBytesHave) {
  StorageMap<int> map;
  const auto tensor = at::zeros({4, 2});
  EXPECT_EQ(map.find(tensor), nullptr);
  map.put(tensor, 7);
  for (const auto& same : {tensor, tensor.detach(), tensor.t(), tensor[2]}) {
    ASSERT_NE(map.find(same), nullptr);
    EXPECT_EQ(*map.find(same), 7);
  }
  EXPECT_EQ(map.find(tensor.clone()), nullptr);
}

TEST(StorageMapTest, PutReplacesAndEraseForgets) {
  StorageMap<int> map;
  const auto tensor = at::zeros({4});
  map.put(tensor, 1) = 2;
  EXPECT_EQ(*map.find(tensor), 2);
  map.put(tensor, 3);
  EXPECT_EQ(*map.find(tensor), 3);
  map.erase(tensor.storage().unsafeGetStorageImpl());
  EXPECT_EQ(map.find(tensor), nullptr);
}

TEST(StorageMapTest, TensorsWithoutAStorageHaveNothing) {
  StorageMap<int> map;
  EXPECT_EQ(map.find(at::zeros({2, 2}).to_sparse()), nullptr);
}

// The weak reference keeps the object, not its bytes: a new storage never has
// the address of one that the map still knows.
TEST(StorageMapTest, NothingIsFoundForOthersThanTheStorageThatDied) {
  StorageMap<int> map;
  for (int i = 0; i < 1000; ++i) {
    const auto tensor = at::zeros({4});
    ASSERT_EQ(map.find(tensor), nullptr) << i;
    map.put(tensor, i);
  }
}

TEST(StorageMapTest, StoragesThatDiedAreSweptAway) {
  StorageMap<int> map;
  std::vector<at::Tensor> kept;
  for (int i = 0; i < 1000; ++i) {
    const auto tensor = at::zeros({4});
    if (i % 100 == 0) kept.push_back(tensor);
    map.put(tensor, i);
  }
  EXPECT_LE(map.size(), 64U);
  for (std::size_t i = 0; i < kept.size(); ++i) {
    ASSERT_NE(map.find(kept[i]), nullptr);
    EXPECT_EQ(*map.find(kept[i]), static_cast<int>(100 * i));
  }
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::base
