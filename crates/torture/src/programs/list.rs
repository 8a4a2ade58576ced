//! The programs, one by one. Those of our own and the configurations are in `examples/`.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use super::batch::BatchCheck;
use super::store::StoreCheck;
use super::web::WebCheck;
use super::words::{WordsCheck, coordinator};
use super::{Check, Program, WORK_DIR};
use crate::clients::{HttpBody, Protocol};
use crate::dice::Dice;
use crate::lab::LabError;

const PAGE_BYTES: usize = 48 << 10;

/// All programs.
pub fn programs() -> Vec<Program> {
    vec![
        redis(),
        memcached(),
        nginx(),
        lighttpd(),
        tarantool(),
        go_kv(),
        go_mapreduce(),
        go_matrix(),
        py_http(),
        shell_pipeline(),
        xz(),
        sqlite(),
        swaptions(),
        streamcluster(),
    ]
}

/// The program with this name.
pub fn by_name(name: &str) -> Option<Program> {
    programs().into_iter().find(|program| program.name == name)
}

/// The sources of the examples.
fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples")
}

/// Where the examples are built.
pub fn examples_dir() -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    let target =
        target.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target"));
    target.join("examples")
}

/// Builds the examples that need it, once in a process.
pub fn build_examples() -> io::Result<()> {
    static BUILT: OnceLock<Result<(), String>> = OnceLock::new();
    let built = BUILT.get_or_init(|| make_examples().map_err(|error| error.to_string()));
    built.clone().map_err(io::Error::other)
}

fn make_examples() -> io::Result<()> {
    let mut make = Command::new("make");
    make.arg("--silent").arg("-C").arg(sources());
    let output = make.arg(format!("BUILD={}", examples_dir().display())).output()?;
    if output.status.success() {
        return Ok(());
    }
    Err(io::Error::other(String::from_utf8_lossy(&output.stderr).into_owned()))
}

/// A command line; `@` stands for the directory of the examples' sources.
fn words(line: &str) -> Vec<String> {
    let sources = sources().to_string_lossy().into_owned();
    line.split_ascii_whitespace().map(|word| word.replace('@', &sources)).collect()
}

fn server(
    name: &'static str,
    needs: &'static [&'static str],
    (command, port): (&str, u16),
    check: impl Check + 'static,
) -> Program {
    Program {
        name,
        needs,
        command: words(command),
        port,
        writes: false,
        kill: (Duration::from_millis(200), Duration::from_millis(1500)),
        check: Box::new(check),
    }
}

fn store(protocol: Protocol, keys: usize, rate_per_s: f64) -> StoreCheck {
    StoreCheck { protocol, keys, rate_per_s }
}

fn redis() -> Program {
    let command = ("redis-server @/config/redis.conf", 6379);
    server("redis-server", &["redis-server"], command, store(Protocol::Redis, 10_000, 800.0))
}

fn memcached() -> Program {
    let command = ("sh @/config/memcached.sh", 11211);
    server("memcached", &["memcached"], command, store(Protocol::Memcached, 10_000, 800.0))
}

fn tarantool() -> Program {
    let command = format!("tarantool @/config/tarantool.lua {WORK_DIR}");
    let check = store(Protocol::Tarantool, 10_000, 800.0);
    let program = server("tarantool", &["tarantool"], (&command, 3301), check);
    Program { writes: true, ..program }
}

fn go_kv() -> Program {
    let program = examples_dir().join("go-kv");
    let command = format!("{} -listen :7000", program.display());
    server("go-kv", &["go"], (&command, 7000), store(Protocol::Line, 10_000, 800.0))
}

fn py_http() -> Program {
    let command = ("python3 @/py-http/server.py --port 8000", 8000);
    server("py-http", &["python3"], command, store(Protocol::HttpStore, 400, 200.0))
}

/// The page of the web servers: not compressible, and it has every byte value.
pub fn page() -> Vec<u8> {
    let mut dice = Dice::new(1);
    (0..PAGE_BYTES).map(|_| dice.roll() as u8).collect()
}

fn page_check() -> WebCheck {
    let files = vec![("work/html/page", page())];
    WebCheck { files, path: "/page", body: HttpBody::Exactly(page()) }
}

fn nginx() -> Program {
    let command = format!("nginx -p {WORK_DIR} -c @/config/nginx.conf -e stderr");
    let program = server("nginx", &["nginx"], (&command, 8080), page_check());
    Program { writes: true, ..program }
}

fn lighttpd() -> Program {
    let command = format!("env SERVE_DIR={WORK_DIR} lighttpd -D -f @/config/lighttpd.conf");
    let program = server("lighttpd", &["lighttpd"], (&command, 8081), page_check());
    Program { writes: true, ..program }
}

fn go_mapreduce() -> Program {
    let program = server("go-mapreduce", &["go"], ("", 7100), WordsCheck);
    Program { command: coordinator(7100), writes: true, ..program }
}

fn batch(
    name: &'static str,
    needs: &'static [&'static str],
    command: &str,
    check: BatchCheck,
) -> Program {
    Program { writes: true, ..server(name, needs, (command, 0), check) }
}

fn outputs(outputs: &'static [&'static str]) -> BatchCheck {
    BatchCheck { files: vec![], outputs, inspect: None, kept: &[], undisturbed: OnceLock::new() }
}

fn go_matrix() -> Program {
    let program = examples_dir().join("go-matrix");
    let command = format!("{} -bits 120 -size 24 -out {WORK_DIR}/power", program.display());
    let check = BatchCheck { kept: &["power.start"], ..outputs(&["power"]) };
    batch("go-matrix", &["go"], &command, check)
}

fn shell_pipeline() -> Program {
    let command = format!("sh @/shell-pipeline/pipeline.sh {WORK_DIR}/sums 80 2000");
    batch("shell-pipeline", &["awk", "seq", "sort", "sha256sum"], &command, outputs(&["sums"]))
}

/// What a program of `examples/batch` must write for this size.
pub(crate) fn golden(name: &str, size: u64) -> Result<String, LabError> {
    let path = sources().join("batch/golden").join(format!("{name}-{size}"));
    let doing = || format!("read {}", path.display());
    std::fs::read_to_string(&path).map_err(|source| LabError::Io { doing: doing(), source })
}

/// Two threads; the result is also compared with the golden copy.
fn arithmetic(name: &'static str, size: u64) -> Program {
    let program = examples_dir().join(name);
    let command = format!("{} 2 {size} {WORK_DIR}/result", program.display());
    let golden = golden(name, size).expect("the golden copy is part of the sources");
    let files = vec![("golden", golden.into_bytes())];
    let inspect = "cmp /srv/hotspare-lab/work/result /srv/hotspare-lab/golden && echo golden";
    let check = BatchCheck { files, inspect: Some(inspect), ..outputs(&["result"]) };
    batch(name, &["cc", "cmp"], &command, check)
}

fn swaptions() -> Program {
    arithmetic("swaptions", 60_000)
}

fn streamcluster() -> Program {
    arithmetic("streamcluster", 20)
}

/// Text that compresses, but not at once.
fn prose() -> Vec<u8> {
    let mut dice = Dice::new(2);
    let mut text = String::new();
    while text.len() < 8 << 20 {
        let word = dice.below(5000);
        text.push_str(&format!("{:x} ", word * word * 7919));
    }
    text.into_bytes()
}

fn xz() -> Program {
    let command = format!("sh @/config/xz.sh /srv/hotspare-lab/prose {WORK_DIR}/prose.xz");
    let inspect = "xz -dc /srv/hotspare-lab/work/prose.xz | cmp - /srv/hotspare-lab/prose && \
                   echo decompresses";
    let files = vec![("prose", prose())];
    let check = BatchCheck { files, inspect: Some(inspect), ..outputs(&["prose.xz"]) };
    batch("xz", &["xz"], &command, check)
}

fn sqlite() -> Program {
    let command = format!("sh @/config/sqlite-insert.sh {WORK_DIR} 400");
    // Whatever number of rows there is, they must be a prefix: the last number is the count.
    let inspect = "sqlite3 /srv/hotspare-lab/work/rows.db 'PRAGMA integrity_check;' \
                   'SELECT count(*) = max(n), count(*), sum(length(value)) FROM rows;'";
    let check = BatchCheck { inspect: Some(inspect), ..outputs(&[]) };
    batch("sqlite3", &["sqlite3"], &command, check)
}
