//! What must agree between two hosts.

use std::arch::x86_64::{__cpuid, __cpuid_count};

use hotspare_replica::HostFacts;
use hotspare_replica::message::{Refuse, RefuseCode};

/// Reads this host's facts: kernel build, processor features, XSAVE layout.
pub fn read() -> anyhow::Result<HostFacts> {
    let names = nix::sys::utsname::uname()?;
    let kernel =
        format!("{} {}", names.release().to_string_lossy(), names.version().to_string_lossy());
    let text = std::fs::read_to_string("/proc/cpuinfo")?;
    let flags = text.lines().find_map(|line| line.strip_prefix("flags"));
    let flags = flags.and_then(|line| line.split_once(':')).map_or("", |(_, flags)| flags);
    let mut cpu_features: Vec<String> = flags.split_ascii_whitespace().map(str::to_owned).collect();
    cpu_features.sort();
    Ok(HostFacts { kernel, cpu_features, others: vec![(XSAVE.into(), xsave_layout())] })
}

const XSAVE: &str = "layout of the XSAVE area";

/// Where a thread's vector registers lie in what is saved of it, in words: components by number,
/// bytes and offset (Intel SDM, volume 1, 13.2: CPUID leaf 13). Registers are restored as they were
/// saved, so it must be the same.
fn xsave_layout() -> String {
    const LEAF: u32 = 13;
    if __cpuid(0).eax < LEAF {
        return "there is none".to_owned();
    }
    let area = __cpuid_count(LEAF, 0);
    let usable = u64::from(area.eax) | u64::from(area.edx) << 32;
    let mut layout = format!("{} bytes", area.ebx);
    // The first two are where they always were.
    for number in (2..63).filter(|number| usable >> number & 1 != 0) {
        let component = __cpuid_count(LEAF, number);
        layout += &format!(", {number}: {} at {}", component.eax, component.ebx);
    }
    layout
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
    // What a host of an older version does not tell is not known to differ.
    for (name, value) in &theirs.others {
        let own = ours.others.iter().find(|own| own.0 == *name);
        if let Some((_, own)) = own.filter(|own| own.1 != *value) {
            wrong.push(format!(
                "the {name} differs ({own}; {value}): use hosts with equal processors, or equal \
                 virtual ones"
            ));
        }
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_difference_is_named_and_a_host_agrees_with_itself() {
        let ours = read().expect("this host has facts");
        assert_eq!(mismatches(&ours, &ours), Vec::<String>::new());
        let mut theirs = ours.clone();
        theirs.kernel.push('x');
        theirs.cpu_features.push("amx".into());
        theirs.others[0].1.push_str(", 18: 8192 at 2816");
        let wrong = mismatches(&ours, &theirs);
        for (said, part) in wrong.iter().zip(["different kernels", "in amx", "18: 8192 at 2816"]) {
            assert!(said.contains(part), "{part}: {said}");
        }
        assert_eq!(wrong.len(), 3);
        theirs.others.clear();
        assert_eq!(mismatches(&ours, &theirs).len(), 2);
    }

    #[test]
    fn the_components_of_the_xsave_area_lie_in_it() {
        let layout = xsave_layout();
        let (bytes, components) = layout.split_once(" bytes").expect("it has a size");
        let bytes: u32 = bytes.parse().expect("a number");
        assert!(bytes >= 576, "{layout}");
        for component in components.split(", ").skip(1) {
            let (size, at) = component
                .split_once(": ")
                .expect("a number")
                .1
                .split_once(" at ")
                .expect("a place");
            let end = size.parse::<u32>().expect("bytes") + at.parse::<u32>().expect("an offset");
            assert!(end <= bytes, "{layout}");
        }
    }
}
