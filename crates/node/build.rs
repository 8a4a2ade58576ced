//! Makes code of the control interface's description. Needs no `protoc`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let described = protox::compile(["hotspare/v1/control.proto"], ["proto"])?;
    println!("cargo:rerun-if-changed=proto");
    tonic_prost_build::configure().compile_fds(described)?;
    Ok(())
}
