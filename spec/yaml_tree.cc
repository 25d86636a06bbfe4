#include "spec/yaml_tree.h"

#include <fmt/format.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>

#include <map>
#include <set>
#include <sstream>

#include "base/format.h"
#include "base/printable.h"

namespace hotbunk {
namespace {

constexpr std::size_t max_depth = 64;
constexpr std::size_t max_nodes = 100'000;
constexpr std::size_t max_doubled_keys = 20;                     // that are reported
constexpr std::size_t max_copied_bytes = std::size_t{16} << 20;  // of what anchors name and aliases repeat

/// Stops the parser from inside a callback; caught by parse_yaml.
struct Refused {
  std::string why;
  SourceLocation where;
};

/// What a copy of a tree takes: a thousand aliases of one long text are a thousand long texts.
struct Extent {
  std::size_t nodes = 0, bytes = 0;
};
Extent extent_of(const YamlNode& node) {
  Extent all{1, sizeof(YamlNode) + node.text.size() + node.where.file.size()};
  const auto add = [&](const YamlNode& child) {
    const Extent of = extent_of(child);
    all.nodes += of.nodes, all.bytes += of.bytes;
  };
  for (const auto& item : node.items) add(item);
  for (const auto& entry : node.entries) {
    all.bytes += sizeof(YamlEntry) - sizeof(YamlNode) + entry.key.size() + entry.where.file.size();
    add(entry.value);
  }
  return all;
}

class TreeBuilder final : public YAML::EventHandler {
 public:
  explicit TreeBuilder(std::string file) : file_(std::move(file)) {}

  void OnDocumentStart(const YAML::Mark&) override {}
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    leaf(make(mark, YamlNode::Kind::null), anchor);
  }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    const auto known = anchors_.find(anchor);
    if (known == anchors_.end()) throw Refused{"an alias refers to a node that contains it", at(mark)};
    about_to_copy(known->second, at(mark));
    nodes_ += extent_of(known->second).nodes;
    check_size(mark);
    leaf(YamlNode(known->second), 0);
  }
  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& value) override {
    YamlNode node = make(mark, YamlNode::Kind::scalar);
    node.quoted = tag == "!";
    if (!node.quoted && (value == "null" || value == "~" || value == "Null" || value == "NULL"))
      node.kind = YamlNode::Kind::null;
    node.text = value;
    leaf(std::move(node), anchor);
  }
  void OnSequenceStart(const YAML::Mark& mark, const std::string&, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    open(make(mark, YamlNode::Kind::sequence), anchor, mark);
  }
  void OnMapStart(const YAML::Mark& mark, const std::string&, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    open(make(mark, YamlNode::Kind::map), anchor, mark);
  }
  void OnSequenceEnd() override { close(); }
  void OnMapEnd() override { close(); }

  YamlNode root;
  Diagnostics doubled_keys;

 private:
  struct Open {
    YamlNode node;
    YAML::anchor_t anchor;
    bool has_key = false;
    std::string key;
    SourceLocation key_where;
  };

  SourceLocation at(const YAML::Mark& mark) const { return {file_, mark.line + 1, mark.column + 1}; }
  YamlNode make(const YAML::Mark& mark, YamlNode::Kind kind) {
    ++nodes_;
    check_size(mark);
    YamlNode node;
    node.kind = kind;
    node.where = at(mark);
    return node;
  }
  void check_size(const YAML::Mark& mark) const {
    if (nodes_ > max_nodes) throw Refused{fmt::format("more than {} values", max_nodes), at(mark)};
  }
  /// Before the memory is spent.
  void about_to_copy(const YamlNode& node, const SourceLocation& where) {
    copied_bytes_ += extent_of(node).bytes;
    if (copied_bytes_ > max_copied_bytes)
      throw Refused{
          fmt::format("anchors and aliases repeat more than {}", format_bytes(static_cast<double>(max_copied_bytes))),
          where};
  }
  void open(YamlNode node, YAML::anchor_t anchor, const YAML::Mark& mark) {
    if (stack_.size() >= max_depth) throw Refused{fmt::format("nested deeper than {} levels", max_depth), at(mark)};
    if (!stack_.empty() && stack_.back().node.kind == YamlNode::Kind::map && !stack_.back().has_key)
      throw Refused{"a key must be a plain name, not a map or a list", node.where};
    stack_.push_back({std::move(node), anchor, false, {}, {}});
  }
  void close() {
    Open done = std::move(stack_.back());
    stack_.pop_back();
    refuse_doubled_keys(done.node);
    leaf(std::move(done.node), done.anchor);
  }
  /// E204: which of the two counts would be chance. The keys of open maps say where this one stands.
  void refuse_doubled_keys(const YamlNode& map) {
    std::set<std::string_view> seen;
    for (const auto& entry : map.entries) {
      if (seen.insert(entry.key).second || doubled_keys.size() >= max_doubled_keys) continue;
      std::string path;
      for (const Open& parent : stack_)
        if (parent.has_key) path += parent.key.substr(0, 100) + ".";
      doubled_keys.push_back({.code = "E204",
                              .message = fmt::format("key {}{} appears twice", path, entry.key.substr(0, 100)),
                              .where = entry.where,
                              .notes = {},
                              .help = "keep one of the two"});
    }
  }
  void leaf(YamlNode node, YAML::anchor_t anchor) {
    if (anchor != 0) {
      about_to_copy(node, node.where);
      anchors_[anchor] = node;
    }
    if (stack_.empty()) {
      root = std::move(node);
      return;
    }
    Open& parent = stack_.back();
    if (parent.node.kind == YamlNode::Kind::sequence) {
      parent.node.items.push_back(std::move(node));
    } else if (!parent.has_key) {
      if (node.kind != YamlNode::Kind::scalar)
        throw Refused{fmt::format("a key must be a plain name, found {}", node.describe()), node.where};
      parent.has_key = true;
      parent.key = std::move(node.text);
      parent.key_where = node.where;
    } else {
      parent.has_key = false;
      parent.node.entries.push_back({std::move(parent.key), parent.key_where, std::move(node)});
    }
  }

  std::string file_;
  std::vector<Open> stack_;
  std::map<YAML::anchor_t, YamlNode> anchors_;
  std::size_t nodes_ = 0, copied_bytes_ = 0;
};

auto syntax_error(std::string message, SourceLocation where) {
  return fail(
      Diagnostic{.code = "E201", .message = std::move(message), .where = std::move(where), .notes = {}, .help = {}});
}

}  // namespace

bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    const std::size_t length = utf8_length(text);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

Result<YamlNode> parse_yaml(const std::string& text, const std::string& file) {
  // yaml-cpp ends a document at a NUL; a file with one is no text.
  if (text.find('\0') != std::string::npos) return syntax_error("the file holds a NUL byte: it is not text", {file});
  if (!is_utf8(text)) return syntax_error("the text is no UTF-8", {file});
  TreeBuilder builder(file);
  try {
    std::istringstream stream(text);
    YAML::Parser parser(stream);
    parser.HandleNextDocument(builder);
    TreeBuilder more(file);
    if (parser.HandleNextDocument(more)) return syntax_error("more than one YAML document", more.root.where);
  } catch (const Refused& refused) {
    return syntax_error(refused.why, refused.where);
  } catch (const YAML::Exception& e) {
    SourceLocation where{file};
    if (!e.mark.is_null()) where = {file, e.mark.line + 1, e.mark.column + 1};
    return syntax_error(fmt::format("invalid YAML: {}", e.msg), where);
  } catch (const std::exception& e) {
    return syntax_error(fmt::format("invalid YAML: {}", e.what()), {file});
  }
  if (!builder.doubled_keys.empty()) return fail(std::move(builder.doubled_keys));
  return std::move(builder.root);
}

const YamlNode* YamlNode::find(std::string_view key) const {
  for (const auto& entry : entries)
    if (entry.key == key) return &entry.value;
  return nullptr;
}

YamlNode* YamlNode::find(std::string_view key) { return const_cast<YamlNode*>(std::as_const(*this).find(key)); }

std::string YamlNode::describe() const {
  switch (kind) {
    case Kind::null:
      return "nothing";
    case Kind::sequence:
      return "a list";
    case Kind::map:
      return "a map";
    case Kind::scalar:
      break;
  }
  const std::string shown = text.size() > 40 ? text.substr(0, 40) + "…" : text;
  const bool numeric = !quoted && !text.empty() && text.find_first_not_of("+-.0123456789eE_") == std::string::npos &&
                       text.find_first_of("0123456789") != std::string::npos;
  return numeric ? fmt::format("the number {}", shown) : fmt::format("the text '{}'", shown);
}

}  // namespace hotbunk
