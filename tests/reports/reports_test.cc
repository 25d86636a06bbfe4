#include <fmt/format.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "base/file.h"
#include "planner/answers/choices.h"
#include "reports/chrome_trace.h"
#include "reports/html.h"
#include "reports/memory_snapshot.h"
#include "reports/metrics_jsonl.h"
#include "reports/palette.h"
#include "reports/report_data.h"
#include "reports/shown_samples.h"
#include "spec/catalog.h"
#include "spec/loader.h"
#include "tests/blocks.h"
#include "tests/json.h"
#include "tests/trace/sample.h"

namespace hotbunk {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

/// The sample plan, with the collective of the sample trace in it.
Plan plan_with_collective() {
  Plan p = test::sample_plan();
  Op gather;
  gather.kind = OpKind::all_gather;
  gather.stream = streams::gather;
  gather.name = "layers.0.all_gather";
  gather.group = 0;
  p.programs[0].phases[2] = {test::block_of(p.programs[0], "micro", {gather})};
  p.programs[0].section(sections::transient).bytes = 4096;
  p.programs[0].buffers[1].offset = 64;
  return p;
}

std::vector<Json> events_where(const Json& document, const char* key, const Json& value) {
  std::vector<Json> out;
  for (const Json& e : document["traceEvents"])
    if (e.contains(key) && e[key] == value) out.push_back(e);
  return out;
}

/// What a shell command prints first.
std::string first_line_of(const std::string& command) {
  FILE* const out = ::popen(command.c_str(), "r");
  REQUIRE(out != nullptr);
  std::string text;
  char buffer[4096];
  for (std::size_t n; (n = std::fread(buffer, 1, sizeof buffer, out)) > 0;) text.append(buffer, n);
  ::pclose(out);
  return text.substr(0, text.find('\n'));
}

}  // namespace

TEST_CASE("a report shows the best and the worst sample of the first and of the last step, in any order of lines") {
  const fs::path file = fs::temp_directory_path() / fmt::format("hotbunk_shown_samples.{}", ::getpid());
  const auto shown = [&](const std::vector<std::pair<int, double>>& lines) {
    {
      std::ofstream out(file);
      int sample = 0;
      for (const auto& [step, reward] : lines)
        out << fmt::format("{{\"step\":{},\"sample\":{},\"tokens\":{{}},\"reward\":{}}}\n", step, sample++, reward);
    }
    const auto read = read_shown_samples(file);
    REQUIRE(read);
    std::vector<int> samples;
    for (const Json& s : *read) samples.push_back(s["sample"].get<int>());
    return samples;
  };
  CHECK(shown({{1, 0.5}, {1, 0.0}, {1, 1.0}, {4, 9.0}, {7, 0.0}, {7, 0.25}, {7, -1.0}}) == std::vector{2, 1, 5, 6});
  CHECK(shown({{3, 1.0}, {3, 0.5}, {3, 0.75}}) == std::vector{0, 1});
  CHECK(shown({{3, 1.0}}) == std::vector{0});
  CHECK(shown({}).empty());
  std::ofstream(file) << "{\"step\":1,\"tokens\":{}}\n{\"step\":1,\"tok";
  const auto cut = read_shown_samples(file);
  REQUIRE_FALSE(cut);
  CHECK(cut.error().front().code == "E111");
  CHECK(cut.error().front().where.line == 2);
  fs::remove(file);
}

TEST_CASE("categories have colours of their own") {
  CHECK(std::set(category_colours.begin(), category_colours.end()).size() == num_categories);
  CHECK(std::set(stream_colours.begin(), stream_colours.end()).size() == stream_colours.size());
}

TEST_CASE("metrics.jsonl has verl's names, a line per step") {
  Trace trace = test::sample_trace();
  trace.metrics[0].values["prompt_length/mean"] = 10;
  trace.metrics[0].values["response_length/mean"] = 9;
  Scenario scenario = test::sample_scenario();
  scenario.algorithm.prompts = 5, scenario.algorithm.samples_per_prompt = 2;
  const std::string text = metrics_jsonl(test::sample_plan(), scenario, trace);
  const auto newline = text.find('\n');
  const Json first = json_from<Json>(text.substr(0, newline)), second = json_from<Json>(text.substr(newline + 1));
  CHECK(first["step"] == 1);
  CHECK(first["actor/loss"] == 0.5);
  CHECK(first["timing_s/gen"].get<double>() == Approx(0.010));
  CHECK(first["timing_s/update_actor"].get<double>() == Approx(0.008));
  CHECK(first["timing_s/step"].get<double>() == Approx(0.018));
  CHECK(first["perf/total_num_tokens"] == 190.0);
  CHECK(first["perf/throughput"].get<double>() == Approx(190 / 0.018 / 2));
  CHECK(first["perf/max_memory_allocated_gb"].get<double>() == Approx(3000.0 / (1 << 30)));
  CHECK(second["step"] == 2);
  CHECK_FALSE(second.contains("perf/throughput"));  // its lengths were not reported
}

TEST_CASE("SFT's throughput counts one sample per prompt") {
  Trace trace = test::sample_trace();
  trace.metrics[0].values["prompt_length/mean"] = 10;
  trace.metrics[0].values["response_length/mean"] = 9;
  Scenario scenario = test::sample_scenario();
  scenario.algorithm.name = AlgorithmName::sft;
  scenario.algorithm.prompts = 5, scenario.algorithm.samples_per_prompt = 2;  // which SFT does not have
  const std::string text = metrics_jsonl(test::sample_plan(), scenario, trace);
  const Json first = json_from<Json>(text.substr(0, text.find('\n')));
  CHECK(first["perf/total_num_tokens"] == 95.0);
  CHECK(first["perf/throughput"].get<double>() == Approx(95 / 0.018 / 2));
}

TEST_CASE("the Chrome trace: rank is process, stream is thread") {
  const Plan plan = plan_with_collective();
  const Json doc = json_from<Json>(chrome_trace(plan, test::sample_trace()));
  CHECK(doc["otherData"]["plan_hash"] == plan_hash(plan));
  CHECK(events_where(doc, "name", "process_name")[1] ==
        Json({{"ph", "M"}, {"pid", 1}, {"tid", 0}, {"name", "process_name"}, {"args", {{"name", "rank 1"}}}}));
  CHECK(
      events_where(doc, "name", "layers.0.linear")[0] ==
      Json({{"ph", "X"},
            {"pid", 0},
            {"tid", 1},
            {"name", "layers.0.linear"},
            {"ts", 15000.0},
            {"dur", 4000.0},
            {"cat", "linear"},
            {"args",
             {{"step", 1}, {"phase", "train"}, {"bytes", 300}, {"GB/s", 0.0}, {"flops", 5000}, {"GFLOP/s", 0.001}}}}));
  CHECK(events_where(doc, "cat", "phase").size() == 10);
}

TEST_CASE("of a rank without spans the Chrome trace has the stays of the steps that others have spans of") {
  const Plan plan = test::sample_plan();
  Trace trace = test::sample_trace();
  std::erase_if(trace.spans, [](const Span& s) { return s.rank == 1 || s.step != 1; });
  REQUIRE(!trace.spans.empty());
  std::set<std::pair<int, int>> stays;  // rank, step
  std::map<int, int> threads;
  const Json document = json_from<Json>(chrome_trace(plan, trace));
  for (const Json& e : document["traceEvents"]) {
    if (e["ph"] == "X" && e["tid"] == 0 && e.value("cat", "") == "phase")
      stays.emplace(e["pid"].get<int>(), e["args"]["step"].get<int>());
    if (e["name"] == "thread_name") ++threads[e["pid"].get<int>()];
  }
  CHECK(stays == std::set<std::pair<int, int>>{{0, 0}, {0, 1}, {0, 2}, {1, 1}});
  CHECK(threads[0] == 1 + std::ssize(plan.streams));
  CHECK(threads[1] == 1);
}

TEST_CASE("the Chrome trace counts live bytes by category") {
  const auto counters =
      events_where(json_from<Json>(chrome_trace(plan_with_collective(), test::sample_trace())), "ph", "C");
  REQUIRE(counters.size() == 10);
  CHECK(counters[1]["ts"] == 14000.0);
  CHECK(counters[1]["args"]["params"] == 2000);
  CHECK(counters[1]["args"]["activations"] == 1000);
  CHECK(counters[2]["args"]["activations"] == 0);
}

TEST_CASE("a flow arrow goes from the last arrival of a collective to those who waited") {
  Trace trace = test::sample_trace();
  for (Span& s : trace.spans)
    if (s.rank == 1 && s.kind == OpKind::all_gather) s.start_ns += 1;
  const Json doc = json_from<Json>(chrome_trace(plan_with_collective(), trace));
  const auto from = events_where(doc, "ph", "s"), to = events_where(doc, "ph", "f");
  REQUIRE(from.size() == 2);  // one per step
  REQUIRE(to.size() == 2);
  CHECK(from[0]["pid"] == 1);
  CHECK(from[0]["ts"] == 13000.001);
  CHECK(to[0]["pid"] == 0);
  CHECK(to[0]["id"] == from[0]["id"]);
  CHECK(to[0]["ts"] == 14999.999);
}

TEST_CASE("the memory snapshot tiles every segment and pairs every event") {
  const Json doc = memory_snapshot(plan_with_collective(), test::sample_trace());
  REQUIRE(doc["device_traces"].size() == 2);
  const Json& events = doc["device_traces"][0];
  REQUIRE(events.size() == 1 + 2 * 3);
  const auto base = doc["segments"][1]["address"].get<std::int64_t>();
  CHECK(events[0] ==
        Json({{"action", "alloc"},
              {"addr", base},
              {"size", 2000},
              {"stream", 0},
              {"time_us", 1000},
              {"frames", Json::array({{{"filename", "load"}, {"line", 0}, {"name", "weights [params]"}}})}}));
  CHECK(events[2]["action"] == "free_requested");
  CHECK(events[3]["action"] == "free_completed");
  REQUIRE(doc["segments"].size() == 4);  // two sections on each of two ranks
  for (const Json& segment : doc["segments"]) {
    std::int64_t at = segment["address"].get<std::int64_t>();
    for (const Json& block : segment["blocks"]) {
      CHECK(block["address"] == at);
      at += block["size"].get<std::int64_t>();
    }
    CHECK(at == segment["address"].get<std::int64_t>() + segment["total_size"].get<std::int64_t>());
  }
  CHECK(doc["segments"][0]["allocated_size"] == 0);  // transients: the logits were freed
  CHECK(doc["segments"][1]["allocated_size"] == 2000);
  CHECK(doc["segments"][1]["blocks"][0]["state"] == "active_allocated");
}

TEST_CASE("a pickle, opcode by opcode") {
  const std::string small = to_pickle({{"a", {1, -2, 1099511627776}}, {"b", nullptr}, {"c", true}});
  using namespace std::string_literals;
  CHECK(small == "\x80\x02}(X\1\0\0\0a](K\1J\xfe\xff\xff\xff\x8a\x08\0\0\0\0\0\1\0\0eX\1\0\0\0bNX\1\0\0\0c\x88u."s);
}

TEST_CASE("the report's data: peak buffers, matrix, tail") {
  Plan plan = plan_with_collective();
  const Scenario scenario = test::sample_scenario();
  const Trace trace = test::sample_trace();
  Program& program = plan.programs[0];
  const auto memory = [](OpKind kind, BufferId buffer) {
    Op op;
    op.kind = kind, op.buffer = buffer;
    return op;
  };
  program.phases[0] = {test::block_of(program, "load", {memory(OpKind::alloc, 0)})};
  program.phases[2] = {test::block_of(program, "micro", {memory(OpKind::alloc, 1), memory(OpKind::free, 1)})};
  const Json data = report_data({plan, scenario, trace, nullptr, ""});
  CHECK(data["at_peak"]["rows"] ==
        Json({{{"name", "weights"}, {"category", "params"}, {"buffers", 1}, {"bytes", 2000}},
              {{"name", "logits"}, {"category", "activations"}, {"buffers", 1}, {"bytes", 1000}}}));
  // 3000 wire bytes of all_gather in each of two steps, to the next in the ring of two.
  CHECK(data["matrix"] == Json({{0.0, 6000.0}, {6000.0, 0.0}}));
  // Rank 1 comes 1 ms later to the rollout and leaves it with rank 0.
  CHECK(data["rollout"][0]["busy_s"].get<double>() == Approx(0.010));
  CHECK(data["rollout"][1]["busy_s"].get<double>() == Approx(0.009));
  CHECK(data["rollout"][0]["idle_s"] == 0.0);
  const Json& points = data["timeline"][1]["bytes"];
  std::int64_t highest = 0;
  for (const Json& point : points)
    highest = std::max(highest, point[0].get<std::int64_t>() + point[3].get<std::int64_t>());
  CHECK(highest == 3200);
  CHECK(data["predicted"].is_null());
  CHECK(report_data({plan, scenario, trace, &trace, ""})["comparison"]["equal"] == true);
}

TEST_CASE("the critical path in both reports") {
  // Step 2 starts at 22 ms. In train (base + 10 to base + 19) linear takes 4 ms, the gather 2; no event orders them.
  const Plan plan = plan_with_collective();
  const Scenario scenario = test::sample_scenario();
  const Trace trace = test::sample_trace();
  const Json data = report_data({plan, scenario, trace, nullptr, ""});
  const Json& path = data["critical"];
  CHECK(path["step"] == 2);
  CHECK(path["busy_s"].get<double>() == Approx(0.004));
  REQUIRE(path["phases"].size() == 2);
  CHECK(path["phases"][0]["phase"] == "rollout");
  CHECK(path["phases"][0]["waiting_s"].get<double>() == Approx(0.010));
  CHECK(path["phases"][1]["elapsed_s"].get<double>() == Approx(0.009));
  CHECK(path["phases"][1]["waiting_s"].get<double>() == Approx(0.005));
  REQUIRE(path["ops"].size() == 1);
  CHECK(path["ops"][0]["name"] == "layers.*.linear");
  int marked = 0;
  for (const Json& row : data["spans"]["rows"]) marked += row[9].get<int>();
  CHECK(marked == 1);
  const auto track = events_where(json_from<Json>(chrome_trace(plan, trace)), "cat", "critical");
  REQUIRE(track.size() == 1);
  CHECK(track[0]["pid"] == 2);  // behind the two ranks
  CHECK(track[0]["ts"] == 35000.0);
  CHECK(track[0]["dur"] == 4000.0);
}

TEST_CASE("response lengths become a histogram whose bins are as wide as needed") {
  const Plan plan = plan_with_collective();
  const Scenario scenario = test::sample_scenario();
  const Trace trace = test::sample_trace();
  CHECK(report_data({plan, scenario, trace, nullptr, ""})["lengths"].is_null());
  // 1, 1, 2, 4: half are 1 or shorter, nine tenths 4 or shorter.
  const Json few = report_data({plan, scenario, trace, nullptr, "", {{1, 2}, {2, 1}, {4, 1}}, {}})["lengths"];
  CHECK(few["width"] == 1);
  CHECK(few["counts"] == Json({0, 2, 1, 0, 1}));
  CHECK(few["mean"] == 2.0);
  CHECK(few["quantiles"] == Json({{0.5, 1}, {0.9, 4}, {0.99, 4}}));
  // Up to 100 tokens in at most 48 bins: of 3 tokens each, 99-101 the last.
  const Json wide = report_data({plan, scenario, trace, nullptr, "", {{2, 1}, {100, 1}}, {}})["lengths"];
  CHECK(wide["width"] == 3);
  CHECK(wide["counts"].size() == 34);
  CHECK(wide["counts"][0] == 1);
  CHECK(wide["counts"][33] == 1);
}

TEST_CASE("the idle tail is an engine's: the mean over its ranks and steps, and its longest") {
  Scenario scenario = test::sample_scenario();
  scenario.rollout.layout.tp = 2;
  const Plan plan = plan_with_collective();
  Trace trace = test::sample_trace();
  for (PhaseSpan& p : trace.phases)  // step 2: rank 1 leaves the rollout 4 ms earlier
    if (p.rank == 1 && p.step == 2 && p.phase == 1) p.end_ns -= 4 * test::ms;
  const Json rows = report_data({plan, scenario, trace, nullptr, ""})["rollout"];
  REQUIRE(rows.size() == 1);
  CHECK(rows[0]["ranks"] == Json({0, 1}));
  CHECK(rows[0]["busy_s"].get<double>() == Approx((0.010 + 0.009 + 0.010 + 0.005) / 4));
  CHECK(rows[0]["idle_s"].get<double>() == Approx(0.001));
  CHECK(rows[0]["longest_idle_s"].get<double>() == Approx(0.004));
}

TEST_CASE("a timeline keeps the peak however little of it is drawn") {
  Trace trace = test::sample_trace();
  trace.memory_events.clear();
  for (int i = 0; i < 100'000; ++i)
    trace.memory_events.push_back(
        {0, Space::device, Category::activations, 2, 1, 3, i * 400, i == 77'777 ? 500'000 : 1});
  const Plan plan = test::sample_plan();
  const Scenario scenario = test::sample_scenario();
  const Json series = report_data({plan, scenario, trace, nullptr, ""})["timeline"][0];
  CHECK(series["t"].size() < 3000);
  std::int64_t highest = 0;
  for (const Json& point : series["bytes"]) highest = std::max(highest, point[3].get<std::int64_t>());
  CHECK(highest == 599'999);
}

TEST_CASE("of a large job the first ranks and the fullest are drawn") {
  Plan plan = test::sample_plan();
  plan.program_of_rank.assign(20, 0);
  Trace trace = test::sample_trace();
  trace.memory.assign(20, test::sample_memory(1000));
  trace.memory[18] = test::sample_memory(1001);
  trace.traffic.resize(20), trace.traffic_totals.resize(20);
  trace.spans[0].rank = 17;
  const Scenario scenario = test::sample_scenario();
  const Json data = report_data({plan, scenario, trace, nullptr, ""});
  CHECK(data["drawn"] == Json({0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 18}));
  CHECK(data["timeline"][15].is_null());
  CHECK(data["timeline"][18].is_object());
  CHECK(data["spans"]["rows"].size() + 1 == trace.spans.size());
  CHECK(data["summary"]["memory"]["by_rank"].size() == 20);
}

TEST_CASE("pictures end where recording ended") {
  const Plan plan = test::sample_plan();
  const Scenario scenario = test::sample_scenario();
  Trace trace = test::sample_trace();
  std::erase_if(trace.spans, [](const Span& s) { return s.step > 1; });
  std::erase_if(trace.memory_events, [](const MemoryEvent& e) { return e.step > 1; });
  const Json recorded = report_data({plan, scenario, trace, nullptr, ""})["recorded"];
  CHECK(recorded["last_step"] == 1);
  CHECK(recorded["end_s"].get<double>() == Approx(0.021));  // rank 1 leaves step 1 at 2 + 18 + 1 ms
}

namespace {

/// "" where there is none; the test says so and is skipped.
std::string browser_here() {
  const std::string browser =
      first_line_of("command -v chromium || command -v chromium-browser || command -v google-chrome");
  if (browser.empty()) {
    std::fprintf(stderr, "skipped: no chromium here that could draw the report\n");
    WARN("skipped: no chromium here that could draw the report");
  }
  return browser;
}

/// Draws a page at three widths: nothing may lie beside it, and its charts' labels are inside and readable.
void check_drawn(const std::string& browser, const std::string& html, int charts) {
  // A page with the report in frames of three widths. It says how each was drawn: how much of it lies beside its frame,
  // and the labels that leave their chart, or are lower than 10 pixels.
  std::string text = json_text(Json(html));
  for (auto at = text.find('<'); at != text.npos; at = text.find('<', at)) text.replace(at, 1, "\\u003c");
  const std::string page = R"(<!doctype html><title>not drawn</title><body><script>
const frames = [390, 768, 1280].map(width => {
  const frame = document.createElement('iframe');
  frame.style = `width:${width}px;height:2000px;border:0`;
  document.body.append(frame);
  frame.contentDocument.open(), frame.contentDocument.write(report), frame.contentDocument.close();
  return frame;
});
const drawn = () => frames.every(frame => frame.contentDocument.querySelectorAll('svg text').length > 40);
const measure = () => document.title = 'drawn ' + JSON.stringify(frames.map(frame => {
  const doc = frame.contentDocument, labels = [...doc.querySelectorAll('svg text')];
  const bad = labels.filter(t => {
    const place = t.ownerSVGElement.getBoundingClientRect(), box = t.getBoundingClientRect();
    return box.left < place.left - 1 || box.right > place.right + 1 || box.height < 10;
  });
  return {width: frame.contentWindow.innerWidth, beside: doc.documentElement.scrollWidth - frame.contentWindow.innerWidth,
    charts: doc.querySelectorAll('svg').length, labels: labels.length, bad: bad.map(t => t.textContent)};
}));
let tries = 100;  // a busy machine draws late
const look = () => drawn() || --tries === 0 ? measure() : setTimeout(look, 200);
setTimeout(look, 500);
</script></body>)";
  const auto folder = std::filesystem::temp_directory_path() / fmt::format("hotbunk_reports_test.{}", ::getpid());
  std::filesystem::create_directories(folder);
  REQUIRE(write_file_atomic(folder / "page.html", "<script>const report = " + text + "</script>\n" + page));
  const std::string title = first_line_of(fmt::format(
      "{0} --headless --no-sandbox --disable-gpu --hide-scrollbars --user-data-dir={1}/browser "
      "--virtual-time-budget=30000 --dump-dom file://{1}/page.html 2> /dev/null | grep -o '<title>drawn .*</title>'",
      browser, folder.string()));
  INFO(title);
  const auto from = title.find('['), to = title.rfind(']');
  REQUIRE(to != title.npos);
  const Json drawn = json_from<Json>(title.substr(from, to + 1 - from));
  REQUIRE(drawn.size() == 3);
  for (std::size_t i = 0; i < 3; ++i) {
    CHECK(drawn[i]["width"] == std::array{390, 768, 1280}[i]);
    CHECK(drawn[i]["beside"] == 0);
    CHECK(drawn[i]["charts"].get<int>() >= charts);
    CHECK(drawn[i]["labels"].get<int>() > 40);
    CHECK(drawn[i]["bad"] == Json::array());
  }
  std::filesystem::remove_all(folder);
}

}  // namespace

TEST_CASE("at any width charts fill their place, labels stay inside and are large enough to read") {
  const std::string browser = browser_here();
  if (browser.empty()) return;
  const Plan plan = plan_with_collective();
  const Scenario scenario = test::sample_scenario();
  Trace trace = test::sample_trace();
  trace.names[0] = "train.backward.layers.0.a_name_that_no_phone_has_room_for.weights";
  check_drawn(browser, html_report({plan, scenario, trace, &trace, "", {{1, 2}, {200, 1}}, {}}), 9);
}

namespace {

/// What `plan --html` writes of a 7B on eight GPUs under another system.
Json plan_page_data(const std::string& name) {
  auto s = load_scenario_text(
      "model: qwen2.5-7b\nprofile: verl-fsdp\ncluster: {gpu: h100-sxm-80gb, nodes: 1}\n"
      "train: {engine: fsdp2, layout: {dp: 8}, micro_batch_tokens: 20480, recompute: full}\n"
      "rollout: {engine: vllm, layout: {tp: 2, dp: 4}, memory_fraction: 0.6}\n"
      "algorithm: {prompts: 256, samples_per_prompt: 8}\n"
      "workload: {prompt_tokens: {mean: 512, max: 1024}, response_tokens: {mean: 2048, max: 8192}}\n",
      "page.yaml");
  REQUIRE(s);
  s->name = name;
  const auto pricer = ScenarioPricer::make(*s, catalog_root());
  REQUIRE(pricer);
  const Explanation e = explain(**pricer);
  const auto choices = choose(**pricer, {});
  REQUIRE(choices);
  const auto numbers = sensitivity(*s, catalog_root());
  REQUIRE(numbers);
  return {{"scenario", name},
          {"ranks", 8},
          {"verdict", name_of(e.verdict.verdict)},
          {"seconds_error", "unvalidated"},
          {"why_not_lowered", {"rollout.engine vllm"}},
          {"findings", Json::array()},
          {"provenance", Json::array({Json::array({"hotbunk", "0"})})},
          {"explanation", json_from<Json>(to_json(e))},
          {"search", json_from<Json>(to_json(*choices))},
          {"sensitivity", json_from<Json>(to_json(*numbers))}};
}

}  // namespace

TEST_CASE("the page of a plan is drawn at any width") {
  if (const std::string browser = browser_here(); !browser.empty())
    check_drawn(browser, html_plan(plan_page_data("seven")), 5);
}

TEST_CASE("the report, and the page of a plan, are one file that loads nothing") {
  const Plan plan = plan_with_collective();
  Scenario scenario = test::sample_scenario();
  scenario.name = "</script><b>odd";
  const Trace trace = test::sample_trace();
  const Json of_plan = plan_page_data(scenario.name);
  const std::string report = html_report({plan, scenario, trace, nullptr, ""}), page = html_plan(of_plan);
  const auto data_of = [](const std::string& html) {
    const std::string open = "id=\"data\">";
    const auto from = html.find(open) + open.size();
    return json_from<Json>(html.substr(from, html.find("</script>", from) - from));
  };
  for (const std::string& html : {report, page}) {
    CHECK(html.find("<title>hotbunk: &lt;/script&gt;&lt;b&gt;odd</title>") != std::string::npos);
    CHECK(html.find("<b>odd") == std::string::npos);
    for (const char* outside : {"src=", "href=", "@import", "url(", "fetch(", "import "})
      CHECK(html.find(outside) == std::string::npos);
  }
  CHECK(data_of(report)["summary"]["scenario"] == scenario.name);
  CHECK(data_of(page) == of_plan);
}

}  // namespace hotbunk
