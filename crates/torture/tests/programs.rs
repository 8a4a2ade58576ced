//! Every check holds for a program that nobody disturbs: what it finds later is not its own doing.

use hotspare_torture::programs::{build_examples, by_name, missing_commands, run_plainly};

fn undisturbed(name: &str) {
    let program = by_name(name).expect("a program of the list");
    build_examples().unwrap();
    let missing = missing_commands(&program);
    assert!(missing.is_empty(), "missing {missing:?}: run `make setup`");
    let run = run_plainly(&program, 1).unwrap();
    println!("{run}");
    assert!(run.is_good(), "{run}");
}

macro_rules! undisturbed {
    ($($test:ident: $name:literal;)*) => {
        $(#[test] fn $test() { undisturbed($name); })*
    };
}

undisturbed! {
    redis_passes_its_check: "redis-server";
    memcached_passes_its_check: "memcached";
    tarantool_passes_its_check: "tarantool";
    nginx_passes_its_check: "nginx";
    lighttpd_passes_its_check: "lighttpd";
    go_kv_passes_its_check: "go-kv";
    go_mapreduce_passes_its_check: "go-mapreduce";
    go_matrix_passes_its_check: "go-matrix";
    py_http_passes_its_check: "py-http";
    swaptions_passes_its_check: "swaptions";
    streamcluster_passes_its_check: "streamcluster";
    a_shell_pipeline_passes_its_check: "shell-pipeline";
    xz_passes_its_check: "xz";
    sqlite_passes_its_check: "sqlite3";
}
