/* The bodies of functions in PTX, as instructions with resolved operands.
 *
 * Registers have fixed rows and local memory has fixed offsets, as in languages without recursion: those of a function begin
 * behind those of its callees, so nothing is saved around a call. */
#include "ptx_text.h"

#include <algorithm>
#include <unordered_map>

#include "exec.h"

namespace emu {
namespace ptx {

char arguments[kMostArguments + 4];

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

Type Statement::first_type() const {
    for (const std::string &suffix : suffixes)
        if (type_named(suffix) != kNoType) return type_named(suffix);
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
    std::unordered_map<std::string, std::pair<uint32_t, uint32_t>>
        ranges;                                 /* of registers: first row, how many */
    std::map<std::string, Variable> variables;  /* local, shared, and parameters of this function: by name */
    std::map<std::string, Space> spaces;        /* of those */
    std::map<std::string, size_t> call_results; /* of the last call: the place in the frame */
    std::vector<std::pair<size_t, std::string>>
        call_stores; /* instructions that store a coming call's arguments */
    std::map<std::string, int> labels;
    std::vector<std::pair<size_t, std::string>> branches;
    int line;

    Body(Module &m, Function &f) : module(m), function(f), scanner{ f.begin, f.end, f.line }, line(f.line) {}
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
    Operand special(SpecialRow row) {
        return { (uint32_t)row, 0 };
    }
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
    if (tokens[0] == ".param" || tokens[0] == ".pragma")
        return; /* places of parameters come from the callee */
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
    std::sort(function.shared.begin(), function.shared.end(),
              [](const Variable &a, const Variable &b) { return a.offset < b.offset; });
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
    else if (range != ranges.end() && digits < name.size() &&
             (uint32_t)atoi(name.c_str() + digits) < range->second.second)
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
    if (!decode_comparison(statement, in) && !decode_float(statement, in) && !decode_integer(statement, in) &&
        !decode_conversion(statement, in) && !decode_memory(statement, in) && !decode_control(statement, in))
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
    Body body(*module, *function);
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
