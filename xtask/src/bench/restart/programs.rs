//! The programs that are restarted, in the manner of FREM's: open ones for its SPEC set.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::tree;

/// One of them.
pub struct Program {
    pub name: &'static str,
    pub command: Vec<String>,
}

/// Where inputs and small programs of our own are made.
pub struct Workshop {
    directory: PathBuf,
}

/// Programs, a command that each needs, and the Debian package that brings it.
const NEEDS: [(&str, &str, &str); 13] = [
    ("bzip2", "bzip2", "bzip2"),
    ("xz", "xz", "xz-utils"),
    ("cc1", "gcc", "gcc"),
    ("perl", "perl", "perl"),
    ("python", "python3", "python3"),
    ("sqlite", "sqlite3", "sqlite3"),
    ("7z", "7z", "p7zip-full"),
    ("lbm", "gcc", "gcc"),
    ("mcf", "gcc", "gcc"),
    ("redis", "redis-server", "redis-server"),
    ("memcached", "memcached", "memcached"),
    ("go", "go", "golang-go"),
    ("java", "javac", "default-jdk-headless"),
];

/// Fails with all that is missing, before anything is measured.
fn ensure_installed(wanted: impl Fn(&str) -> bool) -> Result<()> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let is_there = |command: &str| {
        std::env::split_paths(&path).any(|directory| directory.join(command).is_file())
    };
    let mut missing: Vec<&str> = NEEDS
        .iter()
        .filter(|(program, command, _)| wanted(program) && !is_there(command))
        .map(|(_, _, package)| *package)
        .collect();
    missing.sort_unstable();
    missing.dedup();
    let packages = missing.join(" ");
    ensure!(missing.is_empty(), "not installed: {packages}. Debian: apt-get install {packages}");
    Ok(())
}

fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("run {command:?}"))?;
    if !status.success() {
        bail!("{command:?} ended with {status}");
    }
    Ok(())
}

impl Workshop {
    /// Makes what is wanted and not there yet, below `target`.
    pub fn open(wanted: impl Fn(&str) -> bool) -> Result<Self> {
        ensure_installed(&wanted)?;
        let directory = tree::target().join("restart");
        let sources = tree::root().join("xtask/src/bench/restart");
        std::fs::create_dir_all(&directory)?;
        let workshop = Self { directory };
        for name in ["lbm", "mcf"].into_iter().filter(|name| wanted(name)) {
            let made = workshop.file(name);
            let mut gcc = Command::new("gcc");
            gcc.args(["-O2", "-o"]).arg(&made).arg(sources.join(format!("{name}.c"))).arg("-lm");
            workshop.unless_there(&made, &mut gcc)?;
        }
        if wanted("go") {
            let made = workshop.file("server");
            let mut go = Command::new("go");
            go.args(["build", "-o"]).arg(&made).arg(sources.join("server.go"));
            workshop.unless_there(&made, &mut go)?;
        }
        if wanted("java") {
            let mut javac = Command::new("javac");
            javac.arg("-d").arg(&workshop.directory).arg(sources.join("Server.java"));
            workshop.unless_there(&workshop.file("Server.class"), &mut javac)?;
        }
        workshop.write("text", text)?;
        workshop.write("large.c", large_program)?;
        Ok(workshop)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    fn unless_there(&self, made: &Path, command: &mut Command) -> Result<()> {
        if made.exists() { Ok(()) } else { run(command) }
    }

    fn write(&self, name: &str, content: fn() -> String) -> Result<()> {
        let path = self.file(name);
        if !path.exists() {
            std::fs::write(path, content())?;
        }
        Ok(())
    }

    /// All of them.
    pub fn programs(&self) -> Vec<Program> {
        let at = |name: &str| self.file(name).to_string_lossy().into_owned();
        let endless = format!("while :; do cat {}; done", at("text"));
        let shell = |name, script: String| Program {
            name,
            command: vec!["sh".into(), "-c".into(), script],
        };
        let direct = |name, words: &[&str]| Program {
            name,
            command: words.iter().map(ToString::to_string).collect(),
        };
        vec![
            shell("bzip2", format!("{endless} | bzip2 -9 >/dev/null")),
            shell("xz", format!("{endless} | xz -T1 >/dev/null")),
            shell(
                "cc1",
                format!(
                    "while :; do $(gcc -print-prog-name=cc1) -quiet -O2 {} -o /dev/null; done",
                    at("large.c")
                ),
            ),
            direct("perl", &["perl", "-e", PERL]),
            direct("python", &["python3", "-c", PYTHON]),
            direct("sqlite", &["sqlite3", ":memory:", SQLITE]),
            direct("7z", &["7z", "b", "1000000", "-mmt=1", "-md=24"]),
            direct("lbm", &[&at("lbm")]),
            direct("mcf", &[&at("mcf")]),
            shell("redis", REDIS.into()),
            shell("memcached", MEMCACHED.into()),
            direct("go", &[&at("server")]),
            direct("java", &["java", "-Xmx256m", "-cp", &at("."), "Server"]),
        ]
    }
}

/// 8 MiB that compress as text does.
fn text() -> String {
    let (mut state, mut text) = (1u64, String::new());
    while text.len() < 8 << 20 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        let word = (state >> 40) % 4000;
        text += &format!("w{:x}{}", word * word, if word % 11 == 0 { "\n" } else { " " });
    }
    text
}

/// A C file on which a compiler works for a while.
fn large_program() -> String {
    let function = |n: usize| {
        format!(
            "int f{n}(int *a, int b) {{ int s = {n}; for (int i = 0; i < b; i++) {{ if (a[i] > s) \
             s += a[i] * {}; else s ^= a[b - i] + {}; }} switch (s % 7) {{ case 1: return s * b; \
             case 3: return a[s % b]; case 5: s -= b; }} return s; }}\n",
            n % 13,
            n % 7
        )
    };
    (0..20_000).map(function).collect()
}

const PERL: &str = "
$| = 1; srand 1; my %h; $h{$_} = { n => $_, text => 'value ' x 8 } for 1 .. 150_000;
for (my $i = 1;; $i++) { my $k = 1 + int(rand(30_000)); $h{$k}{n} += $h{1 + $i % 1000}{n} % 7;
  print \"$i\\n\" if $i % 100_000 == 0 }";

const PYTHON: &str = "
import random
random.seed(1)
table = {n: [n, 'value %d' % n] for n in range(250_000)}
i = 0
while True:
    i += 1
    row = table[random.randrange(250_000)]
    row[0] = (row[0] * 31 + i) & 0xffff
    if i % 100_000 == 0:
        print(i, flush=True)
";

const SQLITE: &str = "
pragma temp_store = memory;
create table t(a integer primary key, b text);
with recursive c(x) as (select 1 union all select x + 1 from c where x < 200000)
  insert into t select x, hex(randomblob(24)) from c;
with recursive c(x) as (select 1 union all select x + 1 from c)
  select sum(length(b)) from c join t on t.a = (x * 7919) % 200000 + 1;";

const REDIS: &str = "redis-server --port 7003 --save '' --appendonly no >/dev/null &
while ! redis-cli -p 7003 ping >/dev/null 2>&1; do sleep 0.1; done
redis-benchmark -p 7003 -t set -n 1200000 -r 400000 -d 64 -P 50 -q >/dev/null
exec redis-benchmark -p 7003 -c 4 -n 1000000000 -r 400000 -t get -q >/dev/null";

const MEMCACHED: &str = "memcached -u root -p 7004 -U 0 -m 256 -t 2 &
exec python3 -c \"
import random, socket, time
while True:
    try:
        s = socket.create_connection(('127.0.0.1', 7004))
        break
    except OSError:
        time.sleep(0.1)
f = s.makefile('rb')
value = b'v' * 100
for n in range(300000):
    s.sendall(b'set k%d 0 0 100 noreply\\r\\n%s\\r\\n' % (n, value))
i = 0
while True:
    i += 1
    s.sendall(b'get k%d\\r\\n' % random.randrange(300000))
    while f.readline() != b'END\\r\\n':
        pass
\"";
