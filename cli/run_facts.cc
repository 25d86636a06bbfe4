#include "cli/run_facts.h"

#include <elf.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <link.h>

#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "base/check.h"
#include "base/file.h"
#include "base/json.h"
#include "cli/resume.h"
#include "spec/content_digest.h"
#include "spec/model_config.h"
#include "spec/scenario_keys.h"

namespace hotbunk {
namespace {

using Facts = nlohmann::json;

constexpr std::size_t most_shown = 6;

/// The note that the linker leaves: a hash of what was compiled. "" without one.
std::string build_id() {
  std::string id;
  dl_iterate_phdr(
      [](dl_phdr_info* object, std::size_t, void* out) -> int {
        for (int i = 0; i < object->dlpi_phnum; ++i) {
          const ElfW(Phdr)& segment = object->dlpi_phdr[i];
          if (segment.p_type != PT_NOTE) continue;
          const char* at = reinterpret_cast<const char*>(object->dlpi_addr + segment.p_vaddr);
          for (const char* const end = at + segment.p_memsz; at + sizeof(ElfW(Nhdr)) <= end;) {
            ElfW(Nhdr) note;
            std::memcpy(&note, at, sizeof note);
            const char* const name = at + sizeof note;
            const char* const bytes = name + (note.n_namesz + 3) / 4 * 4;
            if (note.n_type == NT_GNU_BUILD_ID && note.n_namesz == 4 && std::memcmp(name, "GNU", 4) == 0)
              for (ElfW(Word) b = 0; b < note.n_descsz; ++b)
                *static_cast<std::string*>(out) += fmt::format("{:02x}", static_cast<unsigned char>(bytes[b]));
            at = bytes + (note.n_descsz + 3) / 4 * 4;
          }
        }
        return 1;  // the first object is the program itself
      },
      &id);
  return id;
}

bool matters(const std::string& key) {
  return key != "name" && !key.starts_with("cluster.") && !key.starts_with("run.") && !key.starts_with("disturbances.");
}

}  // namespace

PlanFacts scenario_facts(const Scenario& s) {
  PlanFacts facts;
  for (const ScenarioKey& key : scenario_keys()) {
    if (!key.in_resolved || !matters(key.path)) continue;
    const KeyValue value = key.get(s);
    if (!std::holds_alternative<std::monostate>(value)) facts[key.path] = yaml_of(value);
  }
  Facts config = config_of(s.model, DType::f32);
  config.erase("dtype");  // of a checkpoint's files
  for (const auto& [key, value] : config.items()) facts["model." + key] = json_text(value);
  facts["model.weights"] =
      s.model.weights_path.empty() ? "random, from the seed" : content_digest(s.model.weights_path);
  if (!s.task.data.empty()) facts["task.data"] = content_digest(s.task.data);
  return facts;
}

PlanFacts run_facts(const Job& job, const PlanFacts& options) {
  PlanFacts facts = scenario_facts(job.scenario);
  facts.insert(options.begin(), options.end());
  facts["run.timeout_s"] = fmt::format("{}", job.scenario.run.timeout_s);
  facts["plan"] = job.hash;
  facts["build"] = fmt::format("{} {}", HOTBUNK_VERSION, build_id());
  return facts;
}

std::string run_hash(const PlanFacts& run_facts) {
  PlanFacts facts = run_facts;
  for (const char* other : {"first step", "--transport", "--check", "--trace-steps", "run.timeout_s"})
    facts.erase(other);
  std::erase_if(facts, [](const auto& fact) { return fact.first != "task.data" && is_of_the_run(fact.first); });
  return facts_hash(facts);
}

Result<PlanFile> saved_plan(const std::string& path) {
  const auto text = read_file(path);
  return text ? plan_file_from_json(*text, path) : tl::unexpected(text.error());
}

std::vector<std::string> differences(const PlanFacts& then, const std::string& its_name, const PlanFacts& now,
                                     const std::string& our_name) {
  std::set<std::string> names;
  for (const auto& [name, value] : then) names.insert(name);
  for (const auto& [name, value] : now) names.insert(name);
  const auto value_in = [](const PlanFacts& facts, const std::string& name) {
    const auto it = facts.find(name);
    return it == facts.end() ? std::string("nothing") : it->second.empty() ? "\"\"" : it->second.substr(0, 200);
  };
  std::vector<std::string> out;
  std::size_t more = 0;
  for (const std::string& name : names) {
    const std::string a = value_in(then, name), b = value_in(now, name);
    if (a == b) continue;
    if (out.size() < most_shown) out.push_back(fmt::format("{}: {} {}, {} {}", name, its_name, a, our_name, b));
    else ++more;
  }
  if (more > 0) out.push_back(fmt::format("and {} more", more));
  return out;
}

Status check_agreement(World& world, const PlanFacts& ours) {
  if (world.size() == 1) return {};
  if (world.rank() == 0) world.set("facts", json_text(Facts(ours)));
  const Facts text = json_or_discarded<Facts>(world.get("facts", {0}));
  if (!text.is_object()) throw RuntimeFailure("rank 0 does not say what it runs");
  const auto first = text.get<PlanFacts>();
  const auto own = differences(first, "rank 0 has", ours, fmt::format("rank {} has", world.rank()));
  const auto verdicts = world.gather("facts agree", json_text(Facts(own)));
  std::vector<int> others;
  std::vector<std::string> notes = own;
  for (int r = 0; r < world.size(); ++r) {
    const auto theirs = json_from<Facts>(verdicts[static_cast<std::size_t>(r)]).get<std::vector<std::string>>();
    if (theirs.empty()) continue;
    others.push_back(r);
    if (own.empty() && notes.size() < 3 * most_shown) notes.insert(notes.end(), theirs.begin(), theirs.end());
  }
  if (others.empty()) return {};
  return fail(
      Diagnostic{.code = "E705",
                 .message = fmt::format("{} {} {} not run what rank 0 runs", others.size() == 1 ? "rank" : "ranks",
                                        fmt::join(others, ", "), others.size() == 1 ? "does" : "do"),
                 .where = {},
                 .notes = std::move(notes),
                 .help = "start every rank with the same scenario, weights, options and build; nothing was computed"});
}

}  // namespace hotbunk
