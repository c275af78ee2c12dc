#include "phantom/allocator/block.h"

#include <tuple>

namespace lowtide::phantom {

void Block::insert_between(Block* before, Block* after) {
  prev = before;
  next = after;
  if (before) before->next = this;
  if (after) after->prev = this;
}

bool BySize::operator()(const Block* a, const Block* b) const {
  return std::tie(a->stream, a->size, a->address) <
         std::tie(b->stream, b->size, b->address);
}

bool ByAddress::operator()(const Block* a, const Block* b) const {
  return std::tie(a->stream, a->address) < std::tie(b->stream, b->address);
}

void BlockPool::insert_free(Block* block) {
  block->pool_searches = searches;
  free.insert(block);
}

std::int64_t BlockPool::age(const Block& block) const {
  return searches - block.pool_searches;
}

Block* BlockStore::create() {
  if (spare_.empty()) return &blocks_.emplace_back();
  Block* block = spare_.back();
  spare_.pop_back();
  *block = Block{};
  return block;
}

void BlockStore::destroy(Block* block) { spare_.push_back(block); }

std::size_t merge(BlockStore& store, Block* block, Block* neighbour) {
  if (!neighbour || !neighbour->is_free() ||
      neighbour->mapped != block->mapped) {
    return 0;
  }
  // Before its key changes.
  if (neighbour->mapped) {
    neighbour->pool->free.erase(neighbour);
  } else {
    neighbour->pool->unmapped.erase(neighbour);
  }
  const std::size_t added = neighbour->size;
  if (block->prev == neighbour) {
    block->address = neighbour->address;
    block->insert_between(neighbour->prev, block->next);
  } else {
    block->insert_between(block->prev, neighbour->next);
  }
  block->size += added;
  store.destroy(neighbour);
  return added;
}

}  // namespace lowtide::phantom
