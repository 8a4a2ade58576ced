//! The programs, one by one.

use std::sync::OnceLock;
use std::time::Duration;

use super::batch::BatchCheck;
use super::store::StoreCheck;
use super::web::WebCheck;
use super::{Check, Program, WORK_DIR};
use crate::clients::{HttpBody, Protocol};
use crate::dice::Dice;

/// Where every server listens.
pub(super) const PORT: u16 = 8000;
const PAGE_BYTES: usize = 48 << 10;

/// All programs.
pub fn programs() -> Vec<Program> {
    vec![redis(), memcached(), nginx(), lighttpd(), shell_pipeline(), xz(), sqlite()]
}

/// The program with this name.
pub fn by_name(name: &str) -> Option<Program> {
    programs().into_iter().find(|program| program.name == name)
}

fn words(line: &str) -> Vec<String> {
    line.split_ascii_whitespace().map(str::to_owned).collect()
}

fn server(
    name: &'static str,
    needs: &'static [&'static str],
    command: &str,
    check: impl Check + 'static,
) -> Program {
    Program {
        name,
        needs,
        command: words(command),
        writes: false,
        kill: (Duration::from_millis(200), Duration::from_millis(1500)),
        check: Box::new(check),
    }
}

fn redis() -> Program {
    let command = format!(
        "redis-server --port {PORT} --bind * -::* --protected-mode no --save --appendonly no"
    );
    let check = StoreCheck { protocol: Protocol::Redis, keys: 10_000 };
    let mut program = server("redis-server", &["redis-server"], &command, check);
    // An empty word: no snapshots of its own.
    let save = program.command.iter().position(|word| word == "--save").map_or(0, |at| at + 1);
    program.command.insert(save, String::new());
    program
}

fn memcached() -> Program {
    let command = format!("memcached -t 4 -u nobody -m 128 -U 0 -p {PORT}");
    let check = StoreCheck { protocol: Protocol::Memcached, keys: 10_000 };
    server("memcached", &["memcached"], &command, check)
}

/// A page that is not compressible and has every byte value.
fn page() -> Vec<u8> {
    let mut dice = Dice::new(1);
    (0..PAGE_BYTES).map(|_| dice.roll() as u8).collect()
}

fn nginx() -> Program {
    let configuration = format!(
        "daemon off;\nworker_processes 2;\npid {WORK_DIR}/nginx.pid;\nerror_log stderr warn;\n\
         events {{ worker_connections 256; }}\n\
         http {{\n  access_log off;\n  client_body_temp_path {WORK_DIR}/body;\n\
         proxy_temp_path {WORK_DIR}/proxy;\n  fastcgi_temp_path {WORK_DIR}/fastcgi;\n\
         uwsgi_temp_path {WORK_DIR}/uwsgi;\n  scgi_temp_path {WORK_DIR}/scgi;\n\
         keepalive_requests 1000000;\n\
         server {{ listen {PORT}; listen [::]:{PORT}; root /srv/hotspare-lab/www; }}\n}}\n"
    );
    let files = vec![("nginx.conf", configuration.into_bytes()), ("www/page", page())];
    let check = WebCheck { files, path: "/page", body: HttpBody::Exactly(page()) };
    let command = "nginx -e stderr -c /srv/hotspare-lab/nginx.conf";
    let program = server("nginx", &["nginx"], command, check);
    Program { writes: true, ..program }
}

fn lighttpd() -> Program {
    let configuration = format!(
        "server.port = {PORT}\nserver.document-root = \"/srv/hotspare-lab/www\"\n\
         server.max-keep-alive-requests = 60000\nserver.errorlog = \"/dev/null\"\n\
         mimetype.assign = ( \"\" => \"application/octet-stream\" )\n"
    );
    let files = vec![("lighttpd.conf", configuration.into_bytes()), ("www/page", page())];
    let check = WebCheck { files, path: "/page", body: HttpBody::Exactly(page()) };
    let command = "lighttpd -D -f /srv/hotspare-lab/lighttpd.conf";
    server("lighttpd", &["lighttpd"], command, check)
}

fn batch(
    name: &'static str,
    needs: &'static [&'static str],
    script: &str,
    check: BatchCheck,
) -> Program {
    Program {
        name,
        needs,
        command: vec!["sh".to_owned(), "-c".to_owned(), script.to_owned()],
        writes: true,
        kill: (Duration::from_millis(100), Duration::from_millis(1500)),
        check: Box::new(check),
    }
}

fn shell_pipeline() -> Program {
    let script = format!(
        "cd {WORK_DIR} && i=0 && while [ $i -lt 200 ]; do i=$((i + 1)); \
         seq $i $((i + 4000)) | awk '{{ s += $1 * $1; print s % 9973 }}' | sort -n | uniq -c | \
         md5sum >> sums; done && wc -l < sums > lines"
    );
    let outputs = &["sums", "lines"];
    let check = BatchCheck { files: vec![], outputs, inspect: None, undisturbed: OnceLock::new() };
    batch("shell-pipeline", &["awk", "seq", "sort", "uniq", "md5sum"], &script, check)
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
    let script = format!(
        "xz -T2 -6 --block-size=1MiB --stdout /srv/hotspare-lab/prose > {WORK_DIR}/prose.xz"
    );
    let inspect = "xz -dc /srv/hotspare-lab/work/prose.xz | cmp - /srv/hotspare-lab/prose && \
                   echo decompresses";
    let check = BatchCheck {
        files: vec![("prose", prose())],
        outputs: &["prose.xz"],
        inspect: Some(inspect),
        undisturbed: OnceLock::new(),
    };
    batch("xz", &["xz"], &script, check)
}

fn sqlite() -> Program {
    let script = format!(
        "i=0; {{ echo 'CREATE TABLE rows (number INTEGER PRIMARY KEY, said TEXT);'; \
         while [ $i -lt 2000 ]; do i=$((i + 1)); \
         echo \"INSERT INTO rows VALUES ($i, 'row number $i');\"; done; }} | \
         sqlite3 -bail {WORK_DIR}/rows.db"
    );
    // Whatever number of rows there is, they must be a prefix: the last number is the count.
    let inspect = "sqlite3 /srv/hotspare-lab/work/rows.db 'PRAGMA integrity_check;' \
                   'SELECT count(*) = max(number), count(*), sum(length(said)) FROM rows;'";
    let check = BatchCheck {
        files: vec![],
        outputs: &[],
        inspect: Some(inspect),
        undisturbed: OnceLock::new(),
    };
    batch("sqlite3", &["sqlite3"], &script, check)
}
