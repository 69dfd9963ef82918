document.querySelectorAll(".pointer").forEach(function(area){
  var data={},tip=document.createElement("div"),cursor=area.nextElementSibling;
  ["in","out","held"].forEach(function(key){data[key]=area.dataset[key].split("|")});
  tip.className="tip";document.body.appendChild(tip);
  area.addEventListener("pointermove",function(event){
    var box=area.getBoundingClientRect(),share=Math.min(Math.max((event.clientX-box.left)/box.width,0),0.9999);
    var bin=Math.floor(share*data.in.length),x=+area.getAttribute("x")+share*area.getAttribute("width");
    cursor.setAttribute("x1",x);cursor.setAttribute("x2",x);cursor.style.visibility="visible";
    tip.textContent=(share*area.dataset.seconds).toFixed(1)+" s · in "+data.in[bin]+" · out "+data.out[bin]+" · in memory "+data.held[bin];
    tip.style.display="block";
    tip.style.left=Math.max(4,Math.min(event.clientX+14,innerWidth-tip.offsetWidth-8))+"px";
    tip.style.top=(event.clientY+16)+"px";
  });
  area.addEventListener("pointerleave",function(){tip.style.display="none";cursor.style.visibility="hidden"});
});
