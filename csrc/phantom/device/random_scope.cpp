#include "phantom/device/random_scope.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/function_schema.h>

#include "base/check.h"
#include "phantom/device/phantom_device.h"

namespace lowtide::phantom {
namespace {

bool takes_generator(const c10::Argument& argument) {
  const auto type = argument.type();
  return type->kind() == c10::TypeKind::GeneratorType ||
         (type->kind() == c10::TypeKind::OptionalType &&
          type->castRaw<c10::OptionalType>()->getElementType()->kind() ==
              c10::TypeKind::GeneratorType);
}

}  // namespace

RandomScope::RandomScope(const c10::OperatorHandle& op,
                         torch::jit::Stack& stack) {
  const auto& arguments = op.schema().arguments();
  const std::size_t first = stack.size() - arguments.size();
  bool has_generator = false;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (!takes_generator(arguments[i])) continue;
    has_generator = true;
    c10::IValue& value = stack[first + i];
    const at::Generator generator =
        value.isNone() ? default_generator() : value.toGenerator();
    if (generator.device().type() != kPhantom) {
      throw Error(base::error_text(
          toString(op.operator_name()), "a generator of device phantom",
          base::concat("one of ", generator.device()),
          "Make it with torch.Generator(device='phantom')."));
    }
    value = lend(generator);
  }
  if (!has_generator && phantom_device().exact() &&
      op.hasTag(at::Tag::nondeterministic_seeded)) {
    lend_as_cpu_default(default_generator());
  }
}

RandomScope::RandomScope(const at::Generator& generator) {
  lend_as_cpu_default(generator);
}

RandomScope::~RandomScope() {
  if (cpu_state_.defined()) {
    auto cpu = at::detail::getDefaultCPUGenerator();
    lent_.front()->host().set_state(cpu.get_state());
    cpu.set_state(cpu_state_);
  }
  for (PhantomGenerator* generator : lent_) generator->drawn();
}

at::Generator RandomScope::lend(const at::Generator& generator) {
  PhantomGenerator& mine = phantom_generator(generator);
  locks_.emplace_back(mine.mutex_);
  lent_.push_back(&mine);
  return mine.host();
}

void RandomScope::lend_as_cpu_default(const at::Generator& generator) {
  const at::Generator host = lend(generator);
  auto cpu = at::detail::getDefaultCPUGenerator();
  cpu_state_ = cpu.get_state();
  cpu.set_state(host.get_state());
}

}  // namespace lowtide::phantom
