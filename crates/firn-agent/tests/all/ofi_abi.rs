//! Compares the declarations of `ofi::abi` with the headers of the installed libfabric. A C program prints sizes,
//! offsets and constants. The test needs a C compiler and libfabric-dev, which scripts/setup installs.

use std::mem::{offset_of, size_of};
use std::process::Command;

use firn_agent::ofi::abi::*;

macro_rules! constants {
    ($($name:ident),* $(,)?) => { vec![$((stringify!($name).to_owned(), $name as u64)),*] };
}

/// The C expression of the offset of each member, with the offset that is declared in Rust.
macro_rules! members {
    ($c:literal, $rust:ty { $($c_member:ident = $member:ident),* $(,)? }) => {
        vec![$((
            format!("offsetof(struct {}, {})", $c, stringify!($c_member)),
            offset_of!($rust, $member) as u64,
        )),*]
    };
}

macro_rules! whole {
    ($c:literal, $rust:ty) => {
        vec![(format!("sizeof(struct {})", $c), size_of::<$rust>() as u64)]
    };
}

fn declared() -> Vec<(String, u64)> {
    [
        constants![
            FI_RMA,
            FI_READ,
            FI_RECV,
            FI_TRANSMIT,
            FI_REMOTE_READ,
            FI_SOURCE,
            FI_NUMERICHOST,
            FI_CONTEXT,
            FI_CONTEXT2,
            FI_MR_LOCAL,
            FI_MR_VIRT_ADDR,
            FI_MR_ALLOCATED,
            FI_MR_PROV_KEY,
            FI_MR_ENDPOINT,
            FI_SOCKADDR,
            FI_SOCKADDR_IN,
            FI_SOCKADDR_IN6,
            FI_EP_RDM,
            FI_PROGRESS_AUTO,
            FI_THREAD_DOMAIN,
            FI_ENABLE,
            FI_WAIT_NONE,
            FI_WAIT_FD,
            FI_CQ_FORMAT_CONTEXT,
            FI_EAVAIL,
        ],
        whole!("fid", Fid),
        members!("fid", Fid { fclass = fclass, context = context, ops = ops }),
        members!("fi_ops", OpsFid { size = size, close = close, bind = bind, control = control }),
        members!("fi_info", Info {
            next = next, caps = caps, mode = mode, addr_format = addr_format,
            src_addrlen = src_addrlen, dest_addrlen = dest_addrlen, src_addr = src_addr,
            dest_addr = dest_addr, handle = handle, tx_attr = tx_attr, rx_attr = rx_attr,
            ep_attr = ep_attr, domain_attr = domain_attr, fabric_attr = fabric_attr,
        }),
        members!("fi_ep_attr", EpAttr {
            type = kind, protocol = protocol, protocol_version = protocol_version,
            max_msg_size = max_msg_size,
        }),
        members!("fi_domain_attr", DomainAttr {
            domain = domain, name = name, threading = threading,
            control_progress = control_progress, data_progress = data_progress,
            resource_mgmt = resource_mgmt, av_type = av_type, mr_mode = mr_mode,
            mr_key_size = mr_key_size,
        }),
        whole!("fi_fabric_attr", FabricAttr),
        members!("fi_fabric_attr", FabricAttr {
            fabric = fabric, name = name, prov_name = prov_name, prov_version = prov_version,
            api_version = api_version,
        }),
        members!("fid_fabric", Fabric { fid = fid, ops = ops }),
        members!("fi_ops_fabric", OpsFabric { size = size, domain = domain }),
        members!("fid_domain", Domain { fid = fid, ops = ops, mr = mr }),
        members!("fi_ops_domain", OpsDomain {
            size = size, av_open = av_open, cq_open = cq_open, endpoint = endpoint,
        }),
        members!("fi_ops_mr", OpsMr { size = size, reg = reg }),
        whole!("fid_mr", Mr),
        members!("fid_mr", Mr { fid = fid, mem_desc = mem_desc, key = key }),
        whole!("fi_av_attr", AvAttr),
        members!("fi_av_attr", AvAttr {
            type = kind, rx_ctx_bits = rx_ctx_bits, count = count, ep_per_node = ep_per_node,
            name = name, map_addr = map_addr, flags = flags,
        }),
        members!("fid_av", Av { fid = fid, ops = ops }),
        members!("fi_ops_av", OpsAv { size = size, insert = insert }),
        whole!("fi_cq_attr", CqAttr),
        members!("fi_cq_attr", CqAttr {
            size = size, flags = flags, format = format, wait_obj = wait_obj,
            signaling_vector = signaling_vector, wait_cond = wait_cond, wait_set = wait_set,
        }),
        members!("fid_cq", Cq { fid = fid, ops = ops }),
        members!("fi_ops_cq", OpsCq {
            size = size, read = read, readfrom = readfrom, readerr = readerr, sread = sread,
        }),
        whole!("fi_cq_entry", CqEntry),
        members!("fi_cq_err_entry", CqErrEntry {
            op_context = op_context, flags = flags, len = len, buf = buf, data = data, tag = tag,
            olen = olen, err = err, prov_errno = prov_errno, err_data = err_data,
            err_data_size = err_data_size,
        }),
        members!("fid_ep", Ep { fid = fid, ops = ops, cm = cm, msg = msg, rma = rma }),
        members!("fi_ops_cm", OpsCm { size = size, setname = setname, getname = getname }),
        members!("fi_ops_rma", OpsRma { size = size, read = read }),
        whole!("fi_context2", Context),
    ]
    .concat()
}

const HEAD: &str = "\
#include <stddef.h>
#include <stdio.h>
#include <sys/uio.h>
#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
int main(void) {
";

#[test]
fn the_declarations_agree_with_the_headers() {
    let declared = declared();
    let mut program = HEAD.to_owned();
    for (expression, _) in &declared {
        program += &format!("printf(\"%llu\\n\", (unsigned long long)({expression}));\n");
    }
    // libfabric fills such an entry, so the entry that is declared in Rust must be at least as large.
    program += "printf(\"%llu\\n\", (unsigned long long)sizeof(struct fi_cq_err_entry));\n}\n";
    let dir = tempfile::tempdir().expect("a directory");
    let (source, binary) = (dir.path().join("abi.c"), dir.path().join("abi"));
    std::fs::write(&source, program).expect("write the program");
    let compiled = Command::new("cc")
        .arg("-o")
        .args([&binary, &source])
        .output()
        .expect("a C compiler: scripts/setup installs it");
    let messages = String::from_utf8_lossy(&compiled.stderr);
    assert!(compiled.status.success(), "libfabric-dev? {messages}");
    let printed = Command::new(&binary).output().expect("run it").stdout;
    let printed = String::from_utf8(printed).expect("digits");
    let header_values: Vec<u64> = printed
        .lines()
        .map(|line| line.parse().expect("digits"))
        .collect();
    assert_eq!(header_values.len(), declared.len() + 1);
    for ((expression, declared_value), header_value) in declared.iter().zip(&header_values) {
        assert_eq!(declared_value, header_value, "{expression}");
    }
    assert!(*header_values.last().expect("a size") <= size_of::<CqErrEntry>() as u64);
}

#[test]
fn a_function_that_a_table_does_not_have_is_not_called() {
    let short = [size_of::<usize>() * 2, 0];
    let table = short.as_ptr().cast::<OpsRma>();
    // SAFETY: each pointer is null or points to a table that begins with its size.
    unsafe {
        assert!(has(table, offset_of!(OpsRma, read)));
        assert!(!has(table, offset_of!(OpsCm, getname)));
        assert!(!has(std::ptr::null::<OpsRma>(), 0));
    }
}
