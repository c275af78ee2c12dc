#include "spmd/rule_book.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "spmd/operator_rules.h"
#include "spmd/register_rule.h"

LOWTIDE_REPLICATION_RULE("test::from_cpp", lowtide::spmd::SAME_AS(1));

namespace lowtide::spmd {
namespace LOWTIDE_FILE {

TEST(RuleBookTest, OverloadsAndInPlaceNamesFallBack) {
  RuleBook book;
  EXPECT_EQ(book.find("aten::add"), LINEAR);
  EXPECT_EQ(book.find("aten::add.Tensor"), LINEAR);
  EXPECT_EQ(book.find("aten::add_.Tensor"), LINEAR);
  EXPECT_EQ(book.find("aten::gelu"), LOCAL);
  EXPECT_EQ(book.find("mine::op"), std::nullopt);
}

TEST(RuleBookTest, AnOverloadsOwnRuleComesFirst) {
  RuleBook book;
  book.set("mine::op", LOCAL);
  book.set("mine::op.sum", COLLECTIVE(Type::P, Type::R));
  EXPECT_EQ(book.find("mine::op.sum"), COLLECTIVE(Type::P, Type::R));
  EXPECT_EQ(book.find("mine::op.other"), LOCAL);
  book.set("mine::op", LINEAR);
  EXPECT_EQ(book.find("mine::op"), LINEAR);
}

TEST(RuleBookTest, TheMacroRegistersBeforeMain) {
  EXPECT_EQ(rule_book().find("test::from_cpp"), SAME_AS(1));
}

TEST(RuleBookTest, NoNameHasTwoRules) {
  std::set<std::string> names;
  for (const OperatorRules& group : operator_rules()) {
    for (const char* name : group.names) {
      EXPECT_TRUE(names.insert(name).second) << name;
    }
  }
  EXPECT_EQ(names.size(), RuleBook().names().size());
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::spmd
