//! What must agree between two hosts.

use hotspare_replica::HostFacts;
use hotspare_replica::message::{Refuse, RefuseCode};

/// Reads this host's facts: kernel build, processor features, XSAVE size.
pub fn read() -> anyhow::Result<HostFacts> {
    let names = nix::sys::utsname::uname()?;
    let kernel =
        format!("{} {}", names.release().to_string_lossy(), names.version().to_string_lossy());
    let text = std::fs::read_to_string("/proc/cpuinfo")?;
    let flags = text.lines().find_map(|line| line.strip_prefix("flags"));
    let flags = flags.and_then(|line| line.split_once(':')).map_or("", |(_, flags)| flags);
    let mut cpu_features: Vec<String> = flags.split_ascii_whitespace().map(str::to_owned).collect();
    cpu_features.sort();
    Ok(HostFacts { kernel, cpu_features, others: Vec::new() })
}

/// Whether a ghost of a guest on `theirs` can stand on `ours`.
pub fn judge(ours: &HostFacts, theirs: &HostFacts) -> Result<(), Refuse> {
    let wrong = mismatches(ours, theirs);
    match wrong.is_empty() {
        true => Ok(()),
        false => Err(Refuse { code: RefuseCode::Host, text: wrong.join("; ") }),
    }
}

/// All that a guest of `theirs` would find different on `ours`.
pub fn mismatches(ours: &HostFacts, theirs: &HostFacts) -> Vec<String> {
    let mut wrong = Vec::new();
    if ours.kernel != theirs.kernel {
        wrong.push(format!(
            "the hosts run different kernels ({} and {}): boot the same build on both",
            ours.kernel, theirs.kernel
        ));
    }
    let differ = |a: &[String], b: &[String]| -> Vec<String> {
        a.iter().filter(|feature| !b.contains(feature)).cloned().collect()
    };
    let missing = [
        differ(&ours.cpu_features, &theirs.cpu_features),
        differ(&theirs.cpu_features, &ours.cpu_features),
    ]
    .concat();
    if !missing.is_empty() {
        wrong.push(format!(
            "the processors differ in {}: a program may have seen these; use equal hosts or mask \
             them",
            missing.join(", ")
        ));
    }
    wrong
}
