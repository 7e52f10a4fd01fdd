/* PTX as text: the outline of a module, and the bodies of functions as instructions with resolved operands.
 *
 * Registers have fixed rows and local memory has fixed offsets, as in languages without recursion: those of a function begin
 * behind those of its callees, so nothing is saved around a call. */
#include "ptx.h"

#include <algorithm>
#include <cxxabi.h>
#include <string_view>
#include <unordered_map>

#include "exec.h"

namespace emu {
namespace ptx {

char arguments[kMostArguments + 4];

typedef std::vector<std::string_view> Tokens;

static std::string text_of(std::string_view token) {
    return std::string(token);
}

[[noreturn]] static void unknown(const std::string &what) {
    throw Unknown{ what };
}

static size_t align_up(size_t value, size_t alignment) {
    return (value + alignment - 1) / alignment * alignment;
}

/* ---- words ---- */

/* Splits text into words, numbers and single characters. */
struct Scanner {
    const char *at, *end;
    int line;

    void skip_line() {
        while (at < end && *at != '\n') at++;
    }
    void skip_space();
    bool next(std::string_view *token);
};

void Scanner::skip_space() {
    for (; at < end; at++) {
        if (*at == '\n') line++;
        if (at + 1 < end && at[0] == '/' && at[1] == '/') {
            skip_line();
            at--;
        } else if (!isspace((unsigned char)*at)) {
            return;
        }
    }
}

static bool is_word(char c) {
    return isalnum((unsigned char)c) || c == '_' || c == '$' || c == '%' || c == '.';
}

bool Scanner::next(std::string_view *token) {
    skip_space();
    if (at == end) return false;
    const char *begin = at;
    if (*at == '"') {
        for (at++; at < end && *at != '"'; at++) {}
        if (at < end) at++;
    } else if (is_word(*at)) {
        while (at < end && (is_word(*at) || (at + 2 < end && at[0] == ':' && at[1] == ':')))
            at += *at == ':' ? 2 : 1;
    } else {
        at++;
    }
    *token = std::string_view(begin, (size_t)(at - begin));
    return true;
}

static Tokens tokens_of(std::string_view text) {
    Scanner scanner = { text.data(), text.data() + text.size(), 1 };
    Tokens tokens;
    for (std::string_view token; scanner.next(&token);) tokens.push_back(token);
    return tokens;
}

static bool is_number(std::string_view token) {
    return !token.empty() && isdigit((unsigned char)token[0]);
}

/* The bits of a number: an integer, or a float or double in hexadecimal digits. */
static uint64_t number_of(std::string_view token) {
    if (!is_number(token)) unknown("number " + text_of(token));
    const std::string text = text_of(token);
    const char kind = text.size() > 2 && text[0] == '0' ? (char)tolower(text[1]) : ' ';
    if (kind == 'f' || kind == 'd') return strtoull(text.c_str() + 2, nullptr, 16);
    return strtoull(text.c_str(), nullptr, 0);
}

Type type_named(const std::string &name) {
    static const std::map<std::string, Type> types = {
        { "pred", kPredicate }, { "b8", kB8 },     { "b16", kB16 },       { "b32", kB32 },       { "b64", kB64 },
        { "u8", kU8 },          { "u16", kU16 },   { "u32", kU32 },       { "u64", kU64 },       { "s8", kS8 },
        { "s16", kS16 },        { "s32", kS32 },   { "s64", kS64 },       { "f16", kF16 },       { "bf16", kBf16 },
        { "f16x2", kF16x2 },    { "bf16x2", kBf16x2 }, { "f32", kF32 },   { "f64", kF64 },
    };
    const auto found = types.find(name);
    return found == types.end() ? kNoType : found->second;
}

unsigned bytes_of(Type type) {
    switch (type) {
    case kB8:
    case kU8:
    case kS8: return 1;
    case kB16:
    case kU16:
    case kS16:
    case kF16:
    case kBf16: return 2;
    case kB64:
    case kU64:
    case kS64:
    case kF64: return 8;
    default: return 4;
    }
}

/* ---- declarations ---- */

/* One variable: a space, an alignment, a type, a name, a number of elements. */
static Variable variable_of(const Tokens &tokens, size_t begin, size_t end) {
    Variable variable;
    size_t align = 0;
    bool of_pointee = false;
    for (size_t i = begin; i < end; i++) {
        const std::string_view token = tokens[i];
        if (token == ".ptr") {
            of_pointee = true;
        } else if (token == ".align" && i + 1 < end) {
            const size_t value = (size_t)number_of(tokens[++i]);
            if (!of_pointee) align = value;
        } else if (token[0] == '.' && type_named(text_of(token.substr(1))) != kNoType) {
            variable.bytes = bytes_of(type_named(text_of(token.substr(1))));
        } else if (token == "[" && i + 1 < end) {
            variable.bytes *= tokens[i + 1] == "]" ? 0 : (size_t)number_of(tokens[i + 1]);
            break;
        } else if (token[0] != '.') {
            variable.name = text_of(token);
            variable.alignment = align ? align : variable.bytes;
        }
    }
    return variable;
}

static std::vector<Variable> variables_of(const Tokens &tokens, size_t begin, size_t end) {
    std::vector<Variable> variables;
    for (size_t i = begin, from = begin; i <= end; i++) {
        if (i < end && tokens[i] != ",") continue;
        if (i > from) variables.push_back(variable_of(tokens, from, i));
        from = i + 1;
    }
    return variables;
}

/* The place behind the matching parenthesis of the one at `open`. */
static size_t after_list(const Tokens &tokens, size_t open) {
    size_t i = open;
    while (i < tokens.size() && tokens[i] != ")") i++;
    return i + 1;
}

std::string title_of(const std::string &name) {
    const size_t begin = name.find("_Z");
    int status = -1;
    char *text = begin == std::string::npos
                     ? nullptr
                     : abi::__cxa_demangle(name.c_str() + begin, nullptr, nullptr, &status);
    std::string title = text ? text : name;
    free(text);
    const size_t parameters = title.find('(');
    if (parameters != std::string::npos && parameters > 0) title.erase(parameters);
    if (title.compare(0, 5, "void ") == 0) title.erase(0, 5);
    return title;
}

static unsigned product_of_numbers(const Tokens &tokens, size_t begin) {
    unsigned product = 1;
    for (size_t i = begin; i < tokens.size() && (is_number(tokens[i]) || tokens[i] == ","); i++)
        if (tokens[i] != ",") product *= (unsigned)number_of(tokens[i]);
    return product;
}

static void place_parameters(Function *function) {
    size_t offset = 0;
    for (Variable &parameter : function->parameters) {
        offset = align_up(offset, parameter.alignment);
        parameter.offset = offset;
        offset += parameter.bytes;
    }
    if (function->entry && offset > kMostArguments) unknown("arguments of more than 32764 bytes");
}

/* A function's header: results, name, parameters, limits. */
static Function function_of(std::string_view header) {
    const Tokens tokens = tokens_of(header);
    Function function;
    size_t i = 0;
    while (i < tokens.size() && tokens[i][0] == '.') function.entry |= tokens[i++] == ".entry";
    if (i < tokens.size() && tokens[i] == "(") {
        const size_t end = after_list(tokens, i);
        function.results = variables_of(tokens, i + 1, end - 1);
        i = end;
    }
    if (i == tokens.size()) unknown("function without a name");
    function.name = text_of(tokens[i++]);
    function.title = title_of(function.name);
    if (i < tokens.size() && tokens[i] == "(") {
        const size_t end = after_list(tokens, i);
        function.parameters = variables_of(tokens, i + 1, end - 1);
        i = end;
    }
    for (; i < tokens.size(); i++)
        if (tokens[i] == ".maxntid" || tokens[i] == ".reqntid")
            function.most_threads = product_of_numbers(tokens, i + 1);
    place_parameters(&function);
    return function;
}

/* ---- the outline of a module ---- */

struct Outline {
    Module &module;
    const char *at, *end;
    int line = 1;

    void read();
    void skip_body();
    void add_function(std::string_view header);
    void add_variable(std::string_view text);
    void add_data(const Variable &variable, const Tokens &tokens, size_t values);
};

static bool starts_with(const char *at, const char *end, const char *word) {
    const size_t length = strlen(word);
    return (size_t)(end - at) >= length && !memcmp(at, word, length);
}

/* Declarations end with a semicolon, functions with their bodies, and a few directives with their line. */
void Outline::read() {
    const char *begin = at;
    for (; at < end; at++) {
        if (*at == '\n') line++;
        const bool lone = *at == '.' && (starts_with(at, end, ".version") || starts_with(at, end, ".target") ||
                                         starts_with(at, end, ".address_size") || starts_with(at, end, ".file"));
        if (lone || starts_with(at, end, "//")) {
            const bool nothing_before = std::all_of(begin, at, [](char c) { return isspace((unsigned char)c); });
            while (at < end && *at != '\n') at++;
            if (nothing_before) begin = at;
            at--;
            continue;
        }
        const std::string_view text(begin, (size_t)(at - begin));
        if (*at == ';') {
            add_variable(text);
            begin = at + 1;
        } else if (*at == '{' && text.find('=') != std::string_view::npos) {
            while (at < end && *at != '}') at++;
        } else if (*at == '{') {
            add_function(text);
            begin = at + 1;
        }
    }
}

/* From an opening brace to its counterpart. */
void Outline::skip_body() {
    int depth = 0;
    for (; at < end; at++) {
        if (*at == '\n') line++;
        if (starts_with(at, end, "//"))
            while (at + 1 < end && at[1] != '\n') at++;
        else if (*at == '{')
            depth++;
        else if (*at == '}' && --depth == 0)
            return;
    }
    unknown("a function that does not end");
}

void Outline::add_function(std::string_view header) {
    Function function = function_of(header);
    function.module = &module;
    function.line = line;
    function.begin = at + 1;
    skip_body();
    function.end = at;
    Function &kept = module.functions[function.name] = function;
    if (function.entry) module.entries[function.title] = &kept;
}

void Outline::add_variable(std::string_view text) {
    const Tokens tokens = tokens_of(text);
    const auto has = [&](const char *word) { return std::find(tokens.begin(), tokens.end(), word) != tokens.end(); };
    if (tokens.empty() || has(".func") || has(".entry") || has(".alias")) return;
    const size_t equals = (size_t)(std::find(tokens.begin(), tokens.end(), "=") - tokens.begin());
    Variable variable = variable_of(tokens, 0, equals);
    if (has(".shared") && has(".extern")) {
        module.dynamic_name = variable.name;
    } else if (has(".shared")) {
        module.shared_end = align_up(module.shared_end, std::max<size_t>(16, variable.alignment));
        variable.offset = module.shared_end;
        module.shared_end = align_up(variable.offset + variable.bytes, 16) + kRedZone;
        module.shared[variable.name] = variable;
    } else if (has(".global") || has(".const")) {
        add_data(variable, tokens, equals + 1);
    }
}

void Outline::add_data(const Variable &variable, const Tokens &tokens, size_t values) {
    Data &data = module.data[variable.name];
    size_t width = variable.bytes, index = 0;
    for (const std::string_view token : tokens)
        if (token[0] == '.' && type_named(text_of(token.substr(1))) != kNoType)
            width = bytes_of(type_named(text_of(token.substr(1))));
    data.bytes = variable.bytes;
    data.words.assign(variable.bytes / 8 + 2, 0);
    bool negative = false;
    for (size_t i = values; i < tokens.size(); i++) {
        if (tokens[i] == "-") negative = true;
        if (!is_number(tokens[i]) && is_word(tokens[i][0])) data.wrong = "holds the address of " + text_of(tokens[i]);
        if (!is_number(tokens[i]) || (index + 1) * width > variable.bytes) continue;
        const uint64_t value = negative ? 0 - number_of(tokens[i]) : number_of(tokens[i]);
        memcpy(reinterpret_cast<char *>(data.words.data()) + index++ * width, &value, width);
        negative = false;
    }
}

bool read_module(Module *module, const std::string &path, const std::string &text) {
    module->path = path;
    module->text = text;
    module->shared_end = kDynamicOffset + kRedZone;
    module->code.emplace_back(); /* 0 is no instruction's place */
    Outline outline = { *module, module->text.data(), module->text.data() + module->text.size() };
    try {
        outline.read();
    } catch (const Unknown &what) {
        report("%s:%d: unknown %s", path.c_str(), outline.line, what.text.c_str());
        return false;
    }
    return true;
}

/* ---- statements ---- */

bool Statement::has(const char *suffix) const {
    return std::find(suffixes.begin(), suffixes.end(), suffix) != suffixes.end();
}

bool Statement::take(const char *suffix) {
    const auto found = std::find(suffixes.begin(), suffixes.end(), suffix);
    if (found == suffixes.end()) return false;
    suffixes.erase(found);
    return true;
}

Type Statement::take_type() {
    for (size_t i = 0; i < suffixes.size(); i++) {
        const Type type = type_named(suffixes[i]);
        if (type == kNoType) continue;
        suffixes.erase(suffixes.begin() + (long)i);
        return type;
    }
    return kNoType;
}

Space Statement::take_space() {
    const bool cluster = take("shared::cluster"), block = take("shared::cta");
    if (take("shared") || cluster || block) return kShared;
    if (take("global")) return kGlobal;
    if (take("const")) return kConstant;
    if (take("local")) return kLocal;
    if (take("param") || take("param::entry") || take("param::func")) return in_frame ? kLocal : kParameter;
    return kGeneric;
}

const Argument &Statement::argument(size_t index, Argument::Kind kind) const {
    if (index >= arguments.size() || arguments[index].kind != kind) unknown("operands");
    return arguments[index];
}

/* Copies an argument's operands behind those that are there; returns how many there are then. */
static size_t add_operands(const Argument &argument, Operand *to, size_t count, size_t most) {
    if (count + std::max<size_t>(1, argument.parts.size()) > most) unknown("number of operands");
    if (argument.parts.empty()) to[count++] = argument.operand;
    for (const Operand &part : argument.parts) to[count++] = part;
    return count;
}

void Statement::operands(Instruction *in, unsigned results) const {
    size_t to = 0, from = 0;
    if (arguments.size() < results) unknown("number of operands");
    for (size_t i = 0; i < arguments.size(); i++) {
        const Argument &argument = arguments[i];
        if (argument.kind == Argument::kAddress && !in->offset) in->offset = argument.offset;
        if (argument.negated) in->negated = true;
        if (i < results)
            to = add_operands(argument, in->to, to, 4);
        else
            from = add_operands(argument, in->from, from, 5);
    }
    in->results = (uint8_t)to;
    in->count = (uint8_t)from;
}

/* ---- the body of a function ---- */

static const std::map<std::string, SpecialRow> &special_rows() {
    static const std::map<std::string, SpecialRow> rows = {
        { "%tid.x", kTidX },
        { "%tid.y", kTidY },
        { "%tid.z", kTidZ },
        { "%ctaid.x", kBlockX },
        { "%ctaid.y", kBlockY },
        { "%ctaid.z", kBlockZ },
        { "%ntid.x", kBlockDimX },
        { "%ntid.y", kBlockDimY },
        { "%ntid.z", kBlockDimZ },
        { "%nctaid.x", kGridX },
        { "%nctaid.y", kGridY },
        { "%nctaid.z", kGridZ },
        { "%laneid", kLane },
        { "%warpid", kWarpIndex },
        { "%lanemask_eq", kMaskEq },
        { "%lanemask_lt", kMaskLt },
        { "%lanemask_le", kMaskLe },
        { "%lanemask_gt", kMaskGt },
        { "%lanemask_ge", kMaskGe },
        { "%cluster_ctarank", kClusterRank },
        { "%cluster_nctarank", kClusterSize },
        { "%dynamic_smem_size", kDynamicBytes },
        { "%clock", kZero },
        { "%clock64", kZero },
        { "%globaltimer", kZero },
        { "_", kSink },
    };
    return rows;
}

struct Body {
    Module &module;
    Function &function;
    Scanner scanner;
    std::unordered_map<std::string, Operand> registers;
    std::unordered_map<std::string, std::pair<uint32_t, uint32_t>> ranges; /* of registers: first row, how many */
    std::map<std::string, Variable> variables; /* local, shared, and parameters of this function: by name */
    std::map<std::string, Space> spaces;       /* of those */
    std::map<std::string, size_t> call_results;            /* of the last call: the place in the frame */
    std::vector<std::pair<size_t, std::string>> call_stores; /* instructions that store a coming call's arguments */
    std::map<std::string, int> labels;
    std::vector<std::pair<size_t, std::string>> branches;
    int line = 0;

    std::set<Function *> callees();
    void begin();
    void read();
    void link();
    void directive(const Tokens &tokens);
    void declare_registers(const Tokens &tokens);
    void declare_local(const Variable &declared);
    void declare_shared(const Variable &declared);
    void statement(const Tokens &tokens);
    void decode(const Tokens &tokens, size_t at, Instruction *in);
    void read_guard(const Tokens &tokens, size_t *at, Instruction *in);
    void read_branch(const Tokens &tokens, size_t at, Instruction *in);
    void read_call(const Tokens &tokens, size_t at, Instruction *in);
    Argument read_argument(const Tokens &tokens, size_t *at, Statement *statement);
    Argument read_address(const Tokens &tokens, size_t *at, Statement *statement);
    Operand value(const Tokens &tokens, size_t *at);
    bool find_register(const std::string &name, Operand *operand);
    Argument place_of(const std::string &name, Statement *statement);
    Operand constant(uint64_t value);
    Operand special(SpecialRow row) { return { (uint32_t)row, 0 }; }
    Operand sum(const Operand &base, int64_t offset);
    void finish_address(Statement *statement);
};

static void prepare_function(Module *module, Function *function);

/* The functions that the body calls. */
std::set<Function *> Body::callees() {
    std::set<Function *> found;
    bool in_call = false;
    Scanner all = scanner;
    for (std::string_view token; all.next(&token);) {
        if (token == ";") in_call = false;
        if (token == "call" || token == "call.uni") in_call = true;
        if (!in_call) continue;
        const auto callee = module.functions.find(text_of(token));
        if (callee != module.functions.end()) found.insert(&callee->second);
    }
    return found;
}

static void add_shared(Function *function, const Variable &variable) {
    for (const Variable &known : function->shared)
        if (known.offset == variable.offset) return;
    function->shared.push_back(variable);
}

/* Decodes the callees, and places what the function declares in its header behind what is theirs. */
void Body::begin() {
    function.rows = kSpecialRows;
    function.shared_end = module.shared_end;
    for (Function *callee : callees()) {
        prepare_function(&module, callee);
        function.rows = std::max(function.rows, callee->rows);
        function.frame_bytes = std::max(function.frame_bytes, callee->frame_bytes);
        function.shared_end = std::max(function.shared_end, callee->shared_end);
        for (const Variable &variable : callee->shared) add_shared(&function, variable);
    }
    for (std::vector<Variable> *list : { &function.parameters, &function.results })
        for (Variable &variable : *list) {
            if (!function.entry) {
                variable.offset = align_up(function.frame_bytes, std::max<size_t>(8, variable.alignment));
                function.frame_bytes = variable.offset + variable.bytes;
            }
            variables[variable.name] = variable;
            spaces[variable.name] = kParameter;
        }
    function.first = (int)module.code.size();
}

void Body::declare_registers(const Tokens &tokens) {
    for (size_t i = 2; i < tokens.size(); i++) {
        if (tokens[i] == ",") continue;
        const std::string name = text_of(tokens[i]);
        if (i + 2 < tokens.size() && tokens[i + 1] == "<") {
            const uint32_t count = (uint32_t)number_of(tokens[i + 2]);
            ranges[name] = { function.rows, count };
            function.rows += count;
            i += 3;
        } else {
            registers[name] = { function.rows++, 0 };
        }
    }
}

void Body::declare_local(const Variable &declared) {
    Variable variable = declared;
    variable.offset = align_up(function.frame_bytes, std::max<size_t>(16, variable.alignment));
    function.frame_bytes = variable.offset + variable.bytes;
    variables[variable.name] = variable;
    spaces[variable.name] = kLocal;
}

void Body::declare_shared(const Variable &declared) {
    Variable variable = declared;
    variable.offset = align_up(function.shared_end, std::max<size_t>(16, variable.alignment));
    function.shared_end = align_up(variable.offset + variable.bytes, 16) + kRedZone;
    add_shared(&function, variable);
    variables[variable.name] = variable;
    spaces[variable.name] = kShared;
}

void Body::directive(const Tokens &tokens) {
    if (tokens[0] == ".reg") return declare_registers(tokens);
    if (tokens[0] == ".local") return declare_local(variable_of(tokens, 0, tokens.size()));
    if (tokens[0] == ".shared") return declare_shared(variable_of(tokens, 0, tokens.size()));
    if (tokens[0] == ".param" || tokens[0] == ".pragma") return; /* places of parameters come from the callee */
    unknown(text_of(tokens[0]));
}

void Body::read() {
    Tokens tokens;
    for (std::string_view token; scanner.next(&token);) {
        if (tokens.empty()) {
            line = scanner.line;
            if (token == "{" || token == "}" || token == ";") continue;
            if (token == ".loc" || token == ".file") {
                scanner.skip_line();
                continue;
            }
        }
        if (token == ":" && tokens.size() == 1) {
            labels[text_of(tokens[0])] = (int)module.code.size();
            tokens.clear();
        } else if (token != ";") {
            tokens.push_back(token);
        } else {
            if (tokens[0][0] == '.')
                directive(tokens);
            else
                statement(tokens);
            tokens.clear();
        }
    }
}

void Body::link() {
    for (const auto &branch : branches) {
        const auto label = labels.find(branch.second);
        if (label == labels.end()) unknown("label " + branch.second);
        module.code[branch.first].target = label->second;
    }
    if (!call_stores.empty()) unknown("parameter of no call");
}

/* ---- operands ---- */

Operand Body::constant(uint64_t value) {
    const auto known = module.constant_rows.find(value);
    if (known != module.constant_rows.end()) return { known->second, 1 };
    const uint32_t row = (uint32_t)(module.constants.size() / kWarp);
    module.constants.insert(module.constants.end(), kWarp, value);
    module.constant_rows[value] = row;
    return { row, 1 };
}

bool Body::find_register(const std::string &name, Operand *operand) {
    const auto known = registers.find(name);
    if (known != registers.end()) {
        *operand = known->second;
        return true;
    }
    const auto row = special_rows().find(name);
    size_t digits = name.size();
    while (digits > 0 && isdigit((unsigned char)name[digits - 1])) digits--;
    const auto range = ranges.find(name.substr(0, digits));
    if (row != special_rows().end())
        *operand = special(row->second);
    else if (range != ranges.end() && digits < name.size() && (uint32_t)atoi(name.c_str() + digits) < range->second.second)
        *operand = { range->second.first + (uint32_t)atoi(name.c_str() + digits), 0 };
    else
        return false;
    registers[name] = *operand;
    return true;
}

/* The address of a name in its space, as a base and an offset. */
Argument Body::place_of(const std::string &name, Statement *statement) {
    Argument place;
    place.kind = Argument::kAddress;
    place.operand = special(kZero);
    const auto variable = variables.find(name);
    const auto shared = module.shared.find(name);
    const auto data = module.data.find(name);
    const auto result = call_results.find(name);
    if (variable != variables.end()) {
        const Space space = spaces[name];
        place.offset = (int64_t)variable->second.offset;
        if (space == kShared) place.operand = special(kSharedBase);
        if (space == kParameter && function.entry) place.offset += (int64_t)(uintptr_t)arguments;
        statement->in_frame = space == kParameter && !function.entry;
    } else if (shared != module.shared.end()) {
        add_shared(&function, shared->second);
        place.operand = special(kSharedBase);
        place.offset = (int64_t)shared->second.offset;
    } else if (!module.dynamic_name.empty() && name == module.dynamic_name) {
        place.operand = special(kDynamicBase);
    } else if (data != module.data.end()) {
        if (!data->second.wrong.empty()) unknown("data: " + name + " " + data->second.wrong);
        place.offset = (int64_t)(uintptr_t)data->second.words.data();
    } else if (statement->opcode == "st" && statement->has("param")) {
        call_stores.push_back({ module.code.size(), name });
        statement->in_frame = true;
    } else if (result != call_results.end()) {
        place.offset = (int64_t)result->second;
        statement->in_frame = true;
    } else {
        unknown("name " + name);
    }
    return place;
}

/* An instruction that the text does not have: a base and a number in a register of their own. */
Operand Body::sum(const Operand &base, int64_t offset) {
    Instruction in;
    const Operand to = { function.rows++, 0 };
    set_sum(&in, to, base, constant((uint64_t)offset));
    in.counted = false;
    in.line = line;
    in.name = "an address";
    module.code.push_back(in);
    return to;
}

/* A register, a number, or the address of a name. */
Operand Body::value(const Tokens &tokens, size_t *at) {
    const bool negative = tokens[*at] == "-";
    if (negative && ++*at == tokens.size()) unknown("number");
    const std::string name = text_of(tokens[(*at)++]);
    Operand operand;
    if (is_number(name)) return constant(negative ? 0 - number_of(name) : number_of(name));
    if (find_register(name, &operand)) return operand;
    if (!is_word(name[0]) || name[0] == '%') unknown("operand " + name);
    Statement none;
    Argument place = place_of(name, &none);
    if (*at + 1 < tokens.size() && tokens[*at] == "+") {
        place.offset += (int64_t)number_of(tokens[*at + 1]);
        *at += 2;
    }
    if (place.operand.row == kZero) return constant((uint64_t)place.offset);
    return sum(place.operand, place.offset);
}

Argument Body::read_address(const Tokens &tokens, size_t *at, Statement *statement) {
    Argument address;
    address.kind = Argument::kAddress;
    if (++*at >= tokens.size()) unknown("address");
    const std::string name = text_of(tokens[(*at)++]);
    if (is_number(name)) {
        address.operand = special(kZero);
        address.offset = (int64_t)number_of(name);
    } else if (find_register(name, &address.operand)) {
        statement->in_frame = !function.entry;
    } else {
        address = place_of(name, statement);
    }
    while (*at < tokens.size() && tokens[*at] != "]") {
        const bool minus = tokens[*at] == "-";
        if (minus || tokens[*at] == "+") {
            ++*at;
            continue;
        }
        const int64_t number = (int64_t)number_of(tokens[*at]);
        address.offset += tokens[*at - 1] == "-" ? -number : number;
        ++*at;
    }
    ++*at;
    return address;
}

Argument Body::read_argument(const Tokens &tokens, size_t *at, Statement *statement) {
    Argument argument;
    if (tokens[*at] == "[") return read_address(tokens, at, statement);
    if (tokens[*at] == "!") {
        argument.negated = true;
        ++*at;
    }
    if (*at < tokens.size() && tokens[*at] == "{") {
        argument.kind = Argument::kVector;
        for (++*at; *at < tokens.size() && tokens[*at] != "}";) {
            argument.parts.push_back(value(tokens, at));
            if (*at < tokens.size() && tokens[*at] == ",") ++*at;
        }
        ++*at;
        return argument;
    }
    if (*at >= tokens.size()) unknown("operand");
    argument.operand = value(tokens, at);
    if (*at < tokens.size() && tokens[*at] == "|") {
        argument.kind = Argument::kPair;
        ++*at;
        argument.parts = { argument.operand, value(tokens, at) };
    }
    return argument;
}

/* An instruction has room for the offset of its first address. */
void Body::finish_address(Statement *statement) {
    bool first = true;
    for (Argument &argument : statement->arguments) {
        if (argument.kind != Argument::kAddress) continue;
        if (!first && argument.offset) argument.operand = sum(argument.operand, argument.offset);
        if (!first) argument.offset = 0;
        first = false;
    }
}

/* ---- instructions ---- */

void Body::read_guard(const Tokens &tokens, size_t *at, Instruction *in) {
    if (tokens[0] != "@") return;
    *at = 1;
    if (tokens.size() > 1 && tokens[1] == "!") {
        in->guard_negated = true;
        *at = 2;
    }
    Operand guard;
    if (*at >= tokens.size() || !find_register(text_of(tokens[*at]), &guard)) unknown("predicate");
    in->guard = guard.row;
    ++*at;
}

void Body::read_branch(const Tokens &tokens, size_t at, Instruction *in) {
    if (at + 2 != tokens.size()) unknown("branch");
    in->handler = branch;
    in->jumps = true;
    in->kind = kControlClass;
    branches.push_back({ module.code.size(), text_of(tokens[at + 1]) });
}

/* Arguments have been stored at offsets from their names; now the callee says where those are. */
void Body::read_call(const Tokens &tokens, size_t at, Instruction *in) {
    std::vector<std::string> results, names;
    size_t i = at + 1;
    const auto read_list = [&](std::vector<std::string> *list) {
        for (const size_t end = after_list(tokens, i); i < end; i++)
            if (tokens[i] != "(" && tokens[i] != ")" && tokens[i] != ",") list->push_back(text_of(tokens[i]));
        while (i < tokens.size() && tokens[i] == ",") i++;
    };
    if (i < tokens.size() && tokens[i] == "(") read_list(&results);
    if (i == tokens.size()) unknown("call");
    const std::string name = text_of(tokens[i++]);
    while (i < tokens.size() && tokens[i] == ",") i++;
    if (i < tokens.size() && tokens[i] == "(") read_list(&names);
    const auto callee = module.functions.find(name);
    if (callee == module.functions.end()) unknown("function " + name);
    if (names.size() != callee->second.parameters.size() || results.size() != callee->second.results.size())
        unknown("number of parameters of " + name);
    for (const auto &store : call_stores) {
        const auto found = std::find(names.begin(), names.end(), store.second);
        if (found == names.end()) unknown("parameter " + store.second);
        const size_t offset = callee->second.parameters[(size_t)(found - names.begin())].offset;
        module.code[store.first].offset += (int64_t)offset;
    }
    call_stores.clear();
    for (size_t r = 0; r < results.size(); r++) call_results[results[r]] = callee->second.results[r].offset;
    in->handler = call;
    in->jumps = true;
    in->kind = kControlClass;
    in->target = callee->second.first;
}

static std::vector<std::string> split_name(const std::string &name) {
    std::vector<std::string> parts(1);
    for (const char c : name) {
        if (c == '.')
            parts.push_back("");
        else
            parts.back() += c;
    }
    return parts;
}

void Body::decode(const Tokens &tokens, size_t at, Instruction *in) {
    const std::string name = text_of(tokens[at]);
    Statement statement;
    statement.suffixes = split_name(name);
    statement.opcode = statement.suffixes[0];
    statement.suffixes.erase(statement.suffixes.begin());
    if (statement.opcode == "bra") return read_branch(tokens, at, in);
    if (statement.opcode == "call") return read_call(tokens, at, in);
    for (size_t i = at + 1; i < tokens.size();) {
        statement.arguments.push_back(read_argument(tokens, &i, &statement));
        if (i < tokens.size() && tokens[i] != ",") unknown("operand " + text_of(tokens[i]));
        i++;
    }
    finish_address(&statement);
    if (!decode_operation(statement, in) && !decode_conversion(statement, in) && !decode_memory(statement, in) &&
        !decode_control(statement, in))
        unknown("opcode");
    if (!in->handler) unknown("type");
    for (const std::string &suffix : statement.suffixes) unknown("suffix ." + suffix);
}

void Body::statement(const Tokens &tokens) {
    Instruction in;
    size_t at = 0;
    in.line = line;
    read_guard(tokens, &at, &in);
    if (at >= tokens.size()) unknown("statement");
    in.name = module.names.insert(text_of(tokens[at])).first->c_str();
    const size_t stores = call_stores.size();
    try {
        decode(tokens, at, &in);
    } catch (const Unknown &what) {
        unknown(what.text + " in " + in.name);
    }
    if (call_stores.size() > stores) call_stores.back().first = module.code.size();
    module.code.push_back(in);
}

static void prepare_function(Module *module, Function *function) {
    if (function->decoded) return;
    if (function->decoding) unknown("recursion of " + function->title);
    function->decoding = true;
    Body body = { *module, *function, { function->begin, function->end, function->line },
                  {},      {},        {}, {}, {}, {}, {}, {}, function->line };
    try {
        body.begin();
        body.read();
        body.link();
    } catch (const Unknown &what) {
        function->decoding = false;
        if (what.text.find(" (line ") != std::string::npos) throw;
        unknown(what.text + " (line " + std::to_string(body.line) + " of " + module->path + ")");
    }
    function->decoding = false;
    function->decoded = true;
}

bool prepare(Module *module, Function *kernel) {
    try {
        prepare_function(module, kernel);
    } catch (const Unknown &what) {
        report("%s: PTX that the interpreter does not know: %s", kernel->title.c_str(), what.text.c_str());
        return false;
    }
    return true;
}

} // namespace ptx
} // namespace emu
